//! The Lark grammar.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::terminals::{Part, Terminal, Terminals};
use super::{Gbnf, Node, NodeId};

/// Write the grammar with these terminals.
pub(super) fn lark(gbnf: &Gbnf, terminals: &Terminals) -> String {
    let mut emitter = Emitter {
        gbnf,
        terminals,
        text: String::new(),
        rules: vec![],
        terminal_rules: vec![],
        seen: BTreeSet::new(),
        count: 0,
    };
    if terminals.is_terminal(gbnf, gbnf.rules[gbnf.root]) {
        let root = emitter.rule(gbnf.rules[gbnf.root]);
        let _ = writeln!(emitter.text, "start: {root}");
    } else {
        let _ = writeln!(emitter.text, "start: r{}", gbnf.root);
        emitter.seen.insert((gbnf.root, false));
        emitter.rules.push(gbnf.root);
    }
    loop {
        if let Some(rule) = emitter.rules.pop() {
            let body = emitter.rule(gbnf.rules[rule]);
            let _ = writeln!(emitter.text, "r{rule}: {body}");
        } else if let Some(rule) = emitter.terminal_rules.pop() {
            let body = emitter.expression(gbnf.rules[rule]);
            let _ = writeln!(emitter.text, "T{rule}: {body}");
        } else {
            return emitter.text;
        }
    }
}

struct Emitter<'a> {
    gbnf: &'a Gbnf,
    terminals: &'a Terminals,
    text: String,
    /// Rules to write as such.
    rules: Vec<usize>,
    /// Rules to write as terminals.
    terminal_rules: Vec<usize>,
    /// Those written, or in one of the lists; as terminals or not.
    seen: BTreeSet<(usize, bool)>,
    /// Terminals without a rule of their own.
    count: usize,
}

impl Emitter<'_> {
    /// A node in a rule's body.
    fn rule(&mut self, node: NodeId) -> String {
        if self.terminals.is_terminal(self.gbnf, node) {
            return self.terminal(&[node]);
        }
        match &self.gbnf.nodes[node] {
            Node::Seq(_) => {
                let parts = self.terminals.parts(self.gbnf, node);
                let parts = parts.into_iter().map(|part| match part {
                    Part::Terminal(Terminal { nodes, .. }) => self.terminal(&nodes),
                    Part::Node(node) => self.rule(node),
                });
                group(&parts.collect::<Vec<_>>(), " ")
            }
            Node::Alt(options) => {
                let options: Vec<_> = options.iter().map(|&option| self.rule(option)).collect();
                group(&options, " | ")
            }
            &Node::Repeat(inner, least, most) => repeat(&self.rule(inner), least, most),
            &Node::Rule(rule) => {
                if self.seen.insert((rule, false)) {
                    self.rules.push(rule);
                }
                format!("r{rule}")
            }
            Node::Chars(_) => self.expression(node),
        }
    }

    /// The name of a terminal, which is defined if it needs to be.
    fn terminal(&mut self, nodes: &[NodeId]) -> String {
        let expression = self.expressions(nodes);
        if !expression.contains(' ') && !expression.ends_with(['*', '+', '?', '}']) {
            return expression;
        }
        self.count += 1;
        let name = format!("X{}", self.count);
        let _ = writeln!(self.text, "{name}: {expression}");
        name
    }

    /// A node in a terminal's body.
    fn expression(&mut self, node: NodeId) -> String {
        match &self.gbnf.nodes[node] {
            Node::Seq(items) => self.expressions(items),
            Node::Alt(options) => {
                let options: Vec<_> = options.iter().map(|&node| self.expression(node)).collect();
                group(&options, " | ")
            }
            &Node::Repeat(inner, least, most) => repeat(&self.expression(inner), least, most),
            &Node::Rule(rule) => {
                if self.seen.insert((rule, true)) {
                    self.terminal_rules.push(rule);
                }
                format!("T{rule}")
            }
            Node::Chars(ranges) => format!("/{}/", class(ranges)),
        }
    }

    fn expressions(&mut self, nodes: &[NodeId]) -> String {
        let mut parts: Vec<String> = Vec::new();
        for &node in nodes {
            let part = self.expression(node);
            // Characters in a row are one regular expression.
            match parts.last_mut() {
                Some(last) if is_regex(last) && is_regex(&part) => {
                    last.pop();
                    last.push_str(&part[1..]);
                }
                _ => parts.push(part),
            }
        }
        group(&parts, " ")
    }
}

/// True of a regular expression alone: slashes and blanks in it are escaped.
fn is_regex(part: &str) -> bool {
    part.len() > 2 && part.starts_with('/') && part.ends_with('/') && !part.contains(' ')
}

fn group(parts: &[String], separator: &str) -> String {
    match parts {
        [] => "\"\"".to_owned(),
        [part] => part.clone(),
        _ => format!("({})", parts.join(separator)),
    }
}

fn repeat(inner: &str, least: u32, most: Option<u32>) -> String {
    match (least, most) {
        (_, Some(0)) => "\"\"".to_owned(),
        (0, None) => format!("({inner})*"),
        (1, None) => format!("({inner})+"),
        (0, Some(1)) => format!("({inner})?"),
        (_, None) => format!("({inner}){{{least},}}"),
        (_, Some(most)) => format!("({inner}){{{least},{most}}}"),
    }
}

/// Ranges as a part of a regular expression.
fn class(ranges: &[(u32, u32)]) -> String {
    if let &[(first, last)] = ranges
        && first == last
    {
        return escaped(first);
    }
    let mut text = String::from("[");
    for &(first, last) in ranges {
        text.push_str(&escaped(first));
        if first != last {
            text.push('-');
            text.push_str(&escaped(last));
        }
    }
    text.push(']');
    text
}

fn escaped(character: u32) -> String {
    match char::from_u32(character) {
        Some(plain) if plain.is_ascii_alphanumeric() => plain.into(),
        _ => format!("\\x{{{character:x}}}"),
    }
}
