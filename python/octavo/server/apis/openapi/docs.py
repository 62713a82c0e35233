"""`GET /docs`: a page that shows `/openapi.json` and tries it out; it comes from here alone, without a network."""

from __future__ import annotations

import base64
import hashlib
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

if TYPE_CHECKING:
    from octavo.server.state import ServerState

__all__ = ["PAGE", "POLICY", "routes"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 60rem; padding: 1rem; color-scheme: light dark }
h2 { border-bottom: 1px solid #8888; margin-top: 2rem }
details { border: 1px solid #8886; border-radius: 6px; margin: .4rem 0; padding: .3rem .7rem }
summary { cursor: pointer }
b { display: inline-block; min-width: 4.5rem; font-family: monospace }
code, pre, textarea, input { font: 13px/1.45 ui-monospace, monospace }
pre { overflow: auto; max-height: 24rem; background: #8881; padding: .6rem; border-radius: 6px; white-space: pre-wrap }
textarea { width: 100%; box-sizing: border-box; min-height: 8rem }
td { padding: 0 .8rem .2rem 0; vertical-align: top }
"""
_SCRIPT = """
'use strict';
const make = (tag, text, parent) => {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
const main = document.querySelector('main');
const key = document.querySelector('#key');
let spec;

const resolve = (schema) => {
  while (schema && schema.$ref) schema = spec.components.schemas[schema.$ref.split('/').pop()];
  return schema || {};
};
const kind = (schema) => {
  if (schema.$ref) return schema.$ref.split('/').pop();
  if (schema.anyOf) return schema.anyOf.map(kind).filter((name) => name !== 'null').join(' or ');
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(' ');
  let text = [].concat(schema.type || 'any').join(' or ');
  if (schema.items) text += ' of ' + kind(schema.items);
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  if (low !== undefined) text += (schema.minimum === undefined ? ' > ' : ' \\u2265 ') + low;
  if (high !== undefined) text += (schema.maximum === undefined ? ' < ' : ' \\u2264 ') + high;
  return text;
};
const fields = (schema, parent) => {
  const known = resolve(schema);
  if (!known.properties) return;
  const table = make('table', '', parent);
  for (const [name, field] of Object.entries(known.properties)) {
    const row = make('tr', '', table);
    make('code', name + ((known.required || []).includes(name) ? ' *' : ''), make('td', '', row));
    make('td', kind(field), row);
    make('td', field.description, row);
  }
};
const send = async (method, path, body, output) => {
  output.textContent = '\\u2026';
  const headers = {};
  if (key.value) headers.Authorization = 'Bearer ' + key.value;
  if (body !== undefined) headers['Content-Type'] = 'application/json';
  try {
    const answer = await fetch(path.slice(1) || './', { method, headers, body });
    const text = new TextDecoder();
    output.textContent = answer.status + ' ' + (answer.headers.get('content-type') || '') + '\\n\\n';
    const json = (answer.headers.get('content-type') || '').includes('json');
    let whole = '';
    for (const reader = answer.body.getReader(); ;) {
      const { done, value } = await reader.read();
      if (done) break;
      const part = text.decode(value, { stream: true });
      whole += part;
      output.append(part);
    }
    if (json) {
      try { output.textContent = answer.status + '\\n\\n' + JSON.stringify(JSON.parse(whole), null, 2); } catch { }
    }
  } catch (error) { output.textContent = String(error); }
};
const show = (path, method, operation, parent) => {
  const box = make('details', '', parent);
  const head = make('summary', '', box);
  make('b', method.toUpperCase(), head);
  make('code', path, head);
  make('span', ' \\u2014 ' + operation.summary, head);
  box.addEventListener('toggle', () => {
    if (box.childElementCount > 1) return;
    if (operation.description) make('p', operation.description, box);
    const inputs = {};
    for (const parameter of operation.parameters || []) {
      const label = make('label', parameter.name + ' ', make('p', '', box));
      inputs[parameter.name] = make('input', '', label);
    }
    const content = ((operation.requestBody || {}).content || {})['application/json'];
    let area;
    if (content) {
      area = make('textarea', '', box);
      area.spellcheck = false;
      area.value = JSON.stringify(content.example || {}, null, 2);
    }
    const button = make('button', 'Send', box);
    const output = make('pre', '', box);
    button.addEventListener('click', () => send(
      method.toUpperCase(),
      path.replace(/{(\\w+)}/g, (_, name) => encodeURIComponent(inputs[name].value)),
      area ? area.value : undefined, output));
    if (content) { make('h4', 'Request', box); fields(content.schema, box); }
    const answer = (((operation.responses['200'] || {}).content || {})['application/json'] || {}).schema;
    if (answer) { make('h4', 'Response', box); fields(answer, box); }
  });
};
const load = async () => {
  const headers = key.value ? { Authorization: 'Bearer ' + key.value } : {};
  const answer = await fetch('openapi.json', { headers });
  main.textContent = '';
  if (!answer.ok) { make('p', 'The server answers ' + answer.status + '; it may want an API key.', main); return; }
  spec = await answer.json();
  document.querySelector('#version').textContent = spec.info.version;
  const tags = {};
  for (const [path, methods] of Object.entries(spec.paths))
    for (const [method, operation] of Object.entries(methods))
      (tags[operation.tags[0]] ||= []).push([path, method, operation]);
  for (const tag of Object.keys(tags)) {
    make('h2', tag, main);
    for (const [path, method, operation] of tags[tag]) show(path, method, operation, main);
  }
};
key.addEventListener('change', load);
load();
"""
PAGE = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Octavo</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>
<body><h1>Octavo <small id="version"></small></h1>
<p><a href="openapi.json">openapi.json</a> &middot;
<label>API key <input id="key" type="password" autocomplete="off"></label></p>
<main></main><script>{_SCRIPT}</script></body></html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


POLICY = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def routes(state: ServerState) -> list[BaseRoute]:
    """`/docs`."""
    headers = {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def docs(request: Request) -> Response:
        """`GET /docs`: this API, to read and to try."""
        return Response(PAGE, 200, headers, "text/html; charset=utf-8")

    return [Route("/docs", docs)]
