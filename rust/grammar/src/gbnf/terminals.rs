//! Which parts of a grammar become terminals.
//!
//! A terminal is matched as long as it can be. That differs from matching characters where, after some text, one terminal
//! may end with a character of what follows next, and the same or another one may go on with that very character. The
//! characters of the grammar are its *positions*; a *link* leads from positions to those that may come next, within a
//! terminal or from one to the next. Two positions are *together* if one text can lead to both. So: where two are
//! together, and a link between terminals leads from one and a link within a terminal from the other to characters in
//! common, the latter terminal is taken apart.
//!
//! All of it is an approximation to the safe side: which rule called another is not kept apart.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::links::{LinkId, Links, Work, users};
use super::{Gbnf, Node, NodeId};
use crate::error::Error;

/// What stands side by side within a terminal, or alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Terminal {
    /// In a row.
    pub(super) nodes: Vec<NodeId>,
    /// The sequence they are a part of.
    sequence: Option<NodeId>,
}

/// The parts of a grammar that become terminals.
#[derive(Debug, Default)]
pub(super) struct Terminals {
    /// Of each rule, whether it is free of recursion: only then it can be a terminal.
    regular: Vec<bool>,
    /// Nodes that are no terminal though they could be.
    apart: BTreeSet<NodeId>,
    /// Sequences whose items are terminals each for itself.
    loose: BTreeSet<NodeId>,
}

impl Terminals {
    /// True of a node without recursion.
    fn is_regular(&self, gbnf: &Gbnf, node: NodeId) -> bool {
        gbnf.references(node).iter().all(|&rule| self.regular[rule])
    }

    /// True of a node that is a terminal, or part of one.
    pub(super) fn is_terminal(&self, gbnf: &Gbnf, node: NodeId) -> bool {
        !self.apart.contains(&node) && self.is_regular(gbnf, node)
    }

    /// The items of a sequence, put together to terminals.
    pub(super) fn parts(&self, gbnf: &Gbnf, sequence: NodeId) -> Vec<Part> {
        let mut parts = Vec::new();
        for &node in gbnf.children(sequence) {
            if !self.is_terminal(gbnf, node) {
                parts.push(Part::Node(node));
            } else if let Some(Part::Terminal(last)) = parts.last_mut()
                && !self.loose.contains(&sequence)
            {
                last.nodes.push(node);
            } else {
                parts
                    .push(Part::Terminal(Terminal { nodes: vec![node], sequence: Some(sequence) }));
            }
        }
        parts
    }

    fn take_apart(&mut self, terminal: &Terminal) {
        match (&terminal.nodes[..], terminal.sequence) {
            ([node], _) => self.apart.insert(*node),
            (_, Some(sequence)) => self.loose.insert(sequence),
            _ => false,
        };
    }
}

/// A part of a sequence.
pub(super) enum Part {
    /// A terminal.
    Terminal(Terminal),
    /// A node that is not a terminal.
    Node(NodeId),
}

/// Find the terminals.
///
/// # Errors
///
/// A grammar with too many ways to go on.
pub(super) fn find(gbnf: &Gbnf) -> Result<Terminals, Error> {
    let mut terminals = Terminals { regular: regular_rules(gbnf), ..Terminals::default() };
    let mut work = Work(0);
    let links = Links::new(gbnf, &mut work)?;
    let together = together(gbnf, &links, &mut work)?;
    loop {
        work.spend(gbnf.nodes.len() + together.len())?;
        let layout = Layout::new(gbnf, &terminals, &links);
        let mut torn: BTreeSet<usize> = BTreeSet::new();
        for &(one, other) in &together {
            for (ending, going_on) in [(one, other), (other, one)] {
                for &(next, between) in &links.next[&ending] {
                    if !layout.between.contains(&between)
                        || layout.goes_on(links.again.get(&(ending, next, between.0)))
                    {
                        continue;
                    }
                    for &(inner, within) in &links.next[&going_on] {
                        if work.overlap(gbnf, next, inner)?
                            && let Some(owners) = layout.within.get(&within)
                        {
                            torn.extend(owners);
                        }
                    }
                }
            }
        }
        if torn.is_empty() {
            return Ok(terminals);
        }
        for index in torn {
            terminals.take_apart(&layout.terminals[index]);
        }
    }
}

fn regular_rules(gbnf: &Gbnf) -> Vec<bool> {
    let users = users(gbnf);
    let mut regular = vec![false; gbnf.rules.len()];
    let mut open: Vec<usize> = gbnf.rules.iter().map(|&body| gbnf.references(body).len()).collect();
    let mut left: Vec<usize> = (0..open.len()).filter(|&rule| open[rule] == 0).collect();
    while let Some(rule) = left.pop() {
        regular[rule] = true;
        for &user in &users[rule] {
            open[user] -= 1;
            if open[user] == 0 {
                left.push(user);
            }
        }
    }
    regular
}

/// Pairs of positions that one text can lead to, the smaller one first.
fn together(
    gbnf: &Gbnf,
    links: &Links,
    work: &mut Work,
) -> Result<BTreeSet<(NodeId, NodeId)>, Error> {
    let mut pairs = BTreeSet::new();
    let mut left = VecDeque::new();
    let root: Vec<NodeId> = links.root.iter().copied().collect();
    let mut add = |ones: &[NodeId], others: &[NodeId], left: &mut VecDeque<_>| {
        for &one in ones {
            for &other in others {
                if work.overlap(gbnf, one, other)? {
                    let pair = (one.min(other), one.max(other));
                    if pairs.insert(pair) {
                        left.push_back(pair);
                    }
                }
            }
        }
        Ok(())
    };
    add(&root, &root, &mut left)?;
    let next: BTreeMap<NodeId, Vec<NodeId>> = links
        .next
        .iter()
        .map(|(&from, next)| {
            let next: BTreeSet<NodeId> = next.iter().map(|&(to, _)| to).collect();
            (from, next.into_iter().collect())
        })
        .collect();
    while let Some((one, other)) = left.pop_front() {
        add(&next[&one], &next[&other], &mut left)?;
    }
    Ok(pairs)
}

/// Which links lie within terminals, and which between them.
#[derive(Default)]
struct Layout {
    terminals: Vec<Terminal>,
    /// The terminals that hold a link.
    within: BTreeMap<LinkId, BTreeSet<usize>>,
    between: BTreeSet<LinkId>,
}

impl Layout {
    fn new(gbnf: &Gbnf, terminals: &Terminals, links: &Links) -> Self {
        let mut layout = Self::default();
        let root = gbnf.root;
        if terminals.regular[root] && !terminals.apart.contains(&gbnf.rules[root]) {
            layout.terminal(
                gbnf,
                links,
                Terminal { nodes: vec![gbnf.rules[root]], sequence: None },
            );
            return layout;
        }
        let mut seen = BTreeSet::from([root]);
        let mut left = vec![gbnf.rules[root]];
        while let Some(node) = left.pop() {
            if terminals.is_terminal(gbnf, node) {
                layout.terminal(gbnf, links, Terminal { nodes: vec![node], sequence: None });
                continue;
            }
            match &gbnf.nodes[node] {
                Node::Seq(items) => {
                    let mut owner = vec![None; items.len()];
                    let mut place = 0;
                    for part in terminals.parts(gbnf, node) {
                        match part {
                            Part::Terminal(terminal) => {
                                let index = layout.terminals.len();
                                let end = place + terminal.nodes.len();
                                owner[place..end].fill(Some(index));
                                place = end;
                                layout.terminal(gbnf, links, terminal);
                            }
                            Part::Node(node) => {
                                place += 1;
                                left.push(node);
                            }
                        }
                    }
                    for &id in links.of(node) {
                        match owner[id.1] {
                            Some(index) if owner[id.1] == owner[id.2] => {
                                layout.within.entry(id).or_default().insert(index);
                            }
                            _ => {
                                layout.between.insert(id);
                            }
                        }
                    }
                }
                Node::Alt(options) => left.extend(options),
                Node::Repeat(inner, ..) => {
                    layout.between.extend(links.of(node));
                    left.push(*inner);
                }
                Node::Rule(rule) => {
                    if seen.insert(*rule) {
                        left.push(gbnf.rules[*rule]);
                    }
                }
                Node::Chars(_) => {}
            }
        }
        layout
    }

    /// Whether one of these repetitions lies within terminals alone.
    fn goes_on(&self, loops: Option<&Vec<NodeId>>) -> bool {
        loops.is_some_and(|loops| {
            loops.iter().any(|&node| {
                let id = (node, 0, 0);
                self.within.contains_key(&id) && !self.between.contains(&id)
            })
        })
    }

    /// Add a terminal and all links within it.
    fn terminal(&mut self, gbnf: &Gbnf, links: &Links, terminal: Terminal) {
        let index = self.terminals.len();
        let mut seen = BTreeSet::new();
        let mut left = terminal.nodes.clone();
        while let Some(node) = left.pop() {
            for &id in links.of(node) {
                self.within.entry(id).or_default().insert(index);
            }
            if let Node::Rule(rule) = gbnf.nodes[node]
                && seen.insert(rule)
            {
                left.push(gbnf.rules[rule]);
            }
            left.extend(gbnf.children(node));
        }
        self.terminals.push(terminal);
    }
}
