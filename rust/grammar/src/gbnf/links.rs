//! The positions of a grammar and the links between them: see `terminals`.

use std::collections::{BTreeMap, BTreeSet};

use super::{Gbnf, Node, NodeId};
use crate::error::Error;

/// Steps that finding the terminals may take, each with some 50 bytes.
const MAX_WORK: usize = 8_000_000;

/// Which rules refer to each.
pub(super) fn users(gbnf: &Gbnf) -> Vec<Vec<usize>> {
    let mut users = vec![Vec::new(); gbnf.rules.len()];
    for (rule, &body) in gbnf.rules.iter().enumerate() {
        for used in gbnf.references(body) {
            users[used].push(rule);
        }
    }
    users
}

/// Two neighbours of a sequence, by their places in it, or a repetition.
pub(super) type LinkId = (NodeId, usize, usize);

/// Positions at which something may begin or end, and whether it may be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Edges {
    empty: bool,
    first: BTreeSet<NodeId>,
    last: BTreeSet<NodeId>,
}

/// True of a repetition that may end after any of its turns, and goes on without end.
fn is_loop(gbnf: &Gbnf, node: NodeId) -> bool {
    matches!(gbnf.nodes[node], Node::Repeat(_, 0 | 1, None))
}

/// The loops that are a whole turn of a loop.
fn loops_within(gbnf: &Gbnf, outer: NodeId) -> BTreeSet<NodeId> {
    let mut seen = BTreeSet::new();
    let mut left = gbnf.children(outer).to_vec();
    while let Some(node) = left.pop() {
        if !seen.insert(node) {
            continue;
        }
        match &gbnf.nodes[node] {
            Node::Alt(options) => left.extend(options),
            Node::Seq(items) if items.len() == 1 => left.extend(items),
            Node::Rule(rule) => left.push(gbnf.rules[*rule]),
            _ => {}
        }
    }
    seen.retain(|&node| is_loop(gbnf, node));
    seen
}

/// Which position may follow which.
pub(super) struct Links {
    pub(super) next: BTreeMap<NodeId, Vec<(NodeId, LinkId)>>,
    pub(super) root: BTreeSet<NodeId>,
    /// The links of each sequence and repetition.
    of: BTreeMap<NodeId, Vec<LinkId>>,
    /// Of steps from a position to another that a repetition makes: the repetitions right within it that make the same
    /// step. `(x+ | y)*` need not begin another `x+` where it can go on with the one it is in.
    pub(super) again: BTreeMap<(NodeId, NodeId, NodeId), Vec<NodeId>>,
}

impl Links {
    pub(super) fn new(gbnf: &Gbnf, work: &mut Work) -> Result<Self, Error> {
        let users = users(gbnf);
        let mut rules = vec![Edges::default(); gbnf.rules.len()];
        let mut edges = BTreeMap::new();
        let mut left: BTreeSet<usize> = (0..rules.len()).collect();
        while let Some(rule) = left.pop_last() {
            let new = Self::edges(gbnf, &rules, gbnf.rules[rule], &mut edges, work)?;
            if new != rules[rule] {
                rules[rule] = new;
                left.extend(&users[rule]);
            }
        }
        let mut next: BTreeMap<NodeId, Vec<_>> = BTreeMap::new();
        let mut of: BTreeMap<NodeId, Vec<_>> = BTreeMap::new();
        let mut link = |from: &Edges, to: &Edges, id: LinkId| {
            work.spend(from.last.len() * to.first.len())?;
            of.entry(id.0).or_default().push(id);
            for &position in &from.last {
                next.entry(position).or_default().extend(to.first.iter().map(|&to| (to, id)));
            }
            Ok::<(), Error>(())
        };
        for &node in edges.keys() {
            match &gbnf.nodes[node] {
                Node::Seq(items) => {
                    for (to, item) in items.iter().enumerate() {
                        for from in (0..to).rev() {
                            link(&edges[&items[from]], &edges[item], (node, from, to))?;
                            if !edges[&items[from]].empty {
                                break;
                            }
                        }
                    }
                }
                Node::Repeat(inner, _, most) if *most != Some(1) => {
                    link(&edges[inner], &edges[inner], (node, 0, 0))?;
                }
                _ => {}
            }
        }
        for &node in edges.keys() {
            if let Node::Chars(_) = gbnf.nodes[node] {
                next.entry(node).or_default();
            }
        }
        let mut again: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for &outer in edges.keys().filter(|&&node| is_loop(gbnf, node)) {
            for inner in loops_within(gbnf, outer) {
                let body = &edges[&gbnf.children(inner)[0]];
                work.spend(body.last.len() * body.first.len())?;
                for &from in &body.last {
                    for &to in &body.first {
                        again.entry((from, to, outer)).or_default().push(inner);
                    }
                }
            }
        }
        Ok(Self { next, root: rules[gbnf.root].first.clone(), of, again })
    }

    pub(super) fn of(&self, node: NodeId) -> &[LinkId] {
        self.of.get(&node).map_or(&[], Vec::as_slice)
    }

    fn edges(
        gbnf: &Gbnf,
        rules: &[Edges],
        node: NodeId,
        known: &mut BTreeMap<NodeId, Edges>,
        work: &mut Work,
    ) -> Result<Edges, Error> {
        let mut all = Edges::default();
        match &gbnf.nodes[node] {
            Node::Chars(_) => {
                all.first.insert(node);
                all.last.insert(node);
            }
            Node::Rule(rule) => all = rules[*rule].clone(),
            Node::Alt(options) => {
                for &option in options {
                    let option = Self::edges(gbnf, rules, option, known, work)?;
                    all.empty |= option.empty;
                    all.first.extend(option.first);
                    all.last.extend(option.last);
                }
            }
            Node::Repeat(inner, least, most) => {
                all = Self::edges(gbnf, rules, *inner, known, work)?;
                all.empty |= *least == 0;
                if *most == Some(0) {
                    all = Edges { empty: true, ..Edges::default() };
                }
            }
            Node::Seq(items) => {
                all.empty = true;
                for &item in items {
                    let item = Self::edges(gbnf, rules, item, known, work)?;
                    if all.empty {
                        all.first.extend(&item.first);
                    }
                    if !item.empty {
                        all.last.clear();
                    }
                    all.last.extend(item.last);
                    all.empty &= item.empty;
                }
            }
        }
        work.spend(1 + all.first.len() + all.last.len())?;
        known.insert(node, all.clone());
        Ok(all)
    }
}

/// The steps taken so far.
pub(super) struct Work(pub(super) usize);

impl Work {
    pub(super) fn spend(&mut self, steps: usize) -> Result<(), Error> {
        self.0 += steps;
        if self.0 > MAX_WORK {
            return Err(Error::specification(
                "the grammar has too many ways to go on to be turned into Lark; write it in Lark",
            ));
        }
        Ok(())
    }

    /// Whether two positions have a character in common.
    pub(super) fn overlap(
        &mut self,
        gbnf: &Gbnf,
        one: NodeId,
        other: NodeId,
    ) -> Result<bool, Error> {
        self.spend(1)?;
        let (Node::Chars(one), Node::Chars(other)) = (&gbnf.nodes[one], &gbnf.nodes[other]) else {
            return Ok(false);
        };
        Ok(one.iter().any(|a| other.iter().any(|b| a.0 <= b.1 && b.0 <= a.1)))
    }
}
