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

use super::{Gbnf, Node, NodeId};
use crate::error::Error;

/// Steps that finding the terminals may take, each with some 50 bytes.
const MAX_WORK: usize = 8_000_000;

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
    /// Something that is none.
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

/// Which rules refer to each.
fn users(gbnf: &Gbnf) -> Vec<Vec<usize>> {
    let mut users = vec![Vec::new(); gbnf.rules.len()];
    for (rule, &body) in gbnf.rules.iter().enumerate() {
        for used in gbnf.references(body) {
            users[used].push(rule);
        }
    }
    users
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

/// Two neighbours of a sequence, by their places in it, or a repetition.
type LinkId = (NodeId, usize, usize);

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

struct Links {
    next: BTreeMap<NodeId, Vec<(NodeId, LinkId)>>,
    root: BTreeSet<NodeId>,
    /// The links of each sequence and repetition.
    of: BTreeMap<NodeId, Vec<LinkId>>,
    /// Of steps from a position to another that a repetition makes: the repetitions right within it that make the same
    /// step. `(x+ | y)*` need not begin another `x+` where it can go on with the one it is in.
    again: BTreeMap<(NodeId, NodeId, NodeId), Vec<NodeId>>,
}

impl Links {
    fn new(gbnf: &Gbnf, work: &mut Work) -> Result<Self, Error> {
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

    fn of(&self, node: NodeId) -> &[LinkId] {
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
struct Work(usize);

impl Work {
    fn spend(&mut self, steps: usize) -> Result<(), Error> {
        self.0 += steps;
        if self.0 > MAX_WORK {
            return Err(Error::specification(
                "the grammar has too many ways to go on to be turned into Lark; write it in Lark",
            ));
        }
        Ok(())
    }

    /// Whether two positions have a character in common.
    fn overlap(&mut self, gbnf: &Gbnf, one: NodeId, other: NodeId) -> Result<bool, Error> {
        self.spend(1)?;
        let (Node::Chars(one), Node::Chars(other)) = (&gbnf.nodes[one], &gbnf.nodes[other]) else {
            return Ok(false);
        };
        Ok(one.iter().any(|a| other.iter().any(|b| a.0 <= b.1 && b.0 <= a.1)))
    }
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
