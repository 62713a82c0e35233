//! GBNF, the notation of llama.cpp's grammars, turned into Lark.
//!
//! GBNF describes characters; Lark's terminals are matched as long as they can be. A part of the grammar becomes a
//! terminal where both mean the same, which `terminals` finds out, and is taken apart where they do not.

mod emit;
mod links;
mod parse;
mod terminals;

use std::collections::BTreeSet;

use crate::error::Error;

/// A node's place in [`Gbnf::nodes`].
type NodeId = usize;

/// What a rule is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    /// One character of these ranges, sorted and apart.
    Chars(Vec<(u32, u32)>),
    /// One after the other; the empty text without items.
    Seq(Vec<NodeId>),
    /// One of them.
    Alt(Vec<NodeId>),
    /// At least so often, at most so often.
    Repeat(NodeId, u32, Option<u32>),
    /// The rule of that index.
    Rule(usize),
}

/// A grammar as it was read.
#[derive(Debug, Default)]
struct Gbnf {
    nodes: Vec<Node>,
    rules: Vec<NodeId>,
    root: usize,
}

impl Gbnf {
    fn add(&mut self, node: Node) -> NodeId {
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    /// The nodes right below one.
    fn children(&self, node: NodeId) -> &[NodeId] {
        match &self.nodes[node] {
            Node::Seq(children) | Node::Alt(children) => children,
            Node::Repeat(child, ..) => std::slice::from_ref(child),
            Node::Chars(_) | Node::Rule(_) => &[],
        }
    }

    /// Rules that a node refers to.
    fn references(&self, node: NodeId) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut left = vec![node];
        while let Some(node) = left.pop() {
            if let Node::Rule(rule) = self.nodes[node] {
                found.insert(rule);
            }
            left.extend(self.children(node));
        }
        found
    }

    /// Write rules that end, or begin, with themselves as repetitions.
    fn unroll(&mut self) {
        for rule in 0..self.rules.len() {
            let body = self.rules[rule];
            if self.references(body).contains(&rule)
                && let Some(body) = self.unrolled(rule, true).or_else(|| self.unrolled(rule, false))
            {
                self.rules[rule] = body;
            }
        }
    }

    /// `x ::= a x | b` is `a* b`, and `x ::= x a | b` is `b a*`.
    fn unrolled(&mut self, rule: usize, at_end: bool) -> Option<NodeId> {
        let (mut steps, mut ends) = (Vec::new(), Vec::new());
        for mut items in self.alternatives(self.rules[rule]) {
            let itself = if at_end { items.last() } else { items.first() };
            let recursive = itself.is_some_and(|&item| self.nodes[item] == Node::Rule(rule));
            if recursive {
                items.remove(if at_end { items.len() - 1 } else { 0 });
            }
            if items.iter().any(|&item| self.references(item).contains(&rule)) {
                return None;
            }
            let node = self.add(Node::Seq(items));
            if recursive { steps.push(node) } else { ends.push(node) }
        }
        if steps.is_empty() || ends.is_empty() {
            return None;
        }
        let step = self.add(Node::Alt(steps));
        let steps = self.add(Node::Repeat(step, 0, None));
        let end = self.add(Node::Alt(ends));
        Some(self.add(Node::Seq(if at_end { vec![steps, end] } else { vec![end, steps] })))
    }

    /// A body's alternatives, each its items in a row.
    fn alternatives(&self, body: NodeId) -> Vec<Vec<NodeId>> {
        match &self.nodes[body] {
            Node::Alt(options) => {
                options.iter().flat_map(|&option| self.alternatives(option)).collect()
            }
            Node::Repeat(inner, 0, Some(1)) => {
                let mut options = self.alternatives(*inner);
                options.push(Vec::new());
                options
            }
            Node::Seq(items) if items.len() == 1 => self.alternatives(items[0]),
            Node::Seq(items) => vec![items.clone()],
            _ => vec![vec![body]],
        }
    }
}

/// True of a grammar in GBNF: a line begins with a rule written with `::=`.
pub(crate) fn is_gbnf(text: &str) -> bool {
    text.lines().any(|line| {
        line.split_once("::=").is_some_and(|(name, _)| {
            let name = name.trim();
            !name.is_empty() && name.chars().all(parse::is_name)
        })
    })
}

/// A grammar in GBNF as one in Lark that accepts the same texts.
///
/// # Errors
///
/// What is wrong with it, and where.
pub fn gbnf_to_lark(text: &str) -> Result<String, Error> {
    let mut gbnf = parse::parse(text)?;
    gbnf.unroll();
    let terminals = terminals::find(&gbnf)?;
    Ok(emit::lark(&gbnf, &terminals))
}
