//! The prefix cache: a trie over full blocks, stored flat in one hash table.
//!
//! A node's key is its parent's uid and its block's tokens. The tokens are compared on every hit, so a collision costs
//! time and never correctness. Roots are per adapter and tenant salt, so tenants share nothing.
//!
//! A node belongs to a block of the anchor group. The other groups' blocks of the same tokens are attached to it.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher};

use foldhash::fast::FixedState;
use hashbrown::HashTable;

use crate::ids::{BlockId, NodeUid};
use crate::kv_cache::cache_groups::CacheGroups;

/// A node as the table holds it. Its uid lies here, so that a walk needs no second lookup for its next key.
#[derive(Clone, Copy, Debug)]
struct Entry {
    uid: NodeUid,
    parent: NodeUid,
    block: BlockId,
}

/// A block's node: its uid and the hash of its key.
#[derive(Clone, Copy, Debug)]
struct Node {
    uid: NodeUid,
    hash: u64,
}

const VACANT: Node = Node { uid: NodeUid::NONE, hash: 0 };

type RootKey = (u32, Vec<u8>);

/// Which blocks hold which prefixes.
#[derive(Clone, Debug)]
pub struct PrefixCache {
    block_size: usize,
    hasher: FixedState,
    table: HashTable<Entry>,
    nodes: Vec<Node>,
    /// Tokens of each block's node, `block_size` a block.
    tokens: Vec<u32>,
    next_uid: u64,
    num_groups: usize,
    anchor: usize,
    /// Whether a node outlives its children, as full attention keeps a parent's block while a child's is held.
    is_chained: bool,
    /// Blocks of the other groups by the anchor's block, `num_groups` a block; empty with one group.
    attached: Vec<BlockId>,
    /// The anchor's block by the attached block; empty with one group.
    owners: Vec<BlockId>,
    num_attached: usize,
    roots: BTreeMap<RootKey, NodeUid>,
    /// Key of each root, and how many requests and first blocks use it. The last one removes it.
    root_users: BTreeMap<NodeUid, (RootKey, usize)>,
}

impl PrefixCache {
    /// An empty cache over `num_blocks` blocks of `block_size` tokens.
    #[must_use]
    pub fn new(num_blocks: usize, block_size: usize, seed: u64, groups: &CacheGroups) -> Self {
        let others = if groups.len() > 1 { num_blocks } else { 0 };
        Self {
            block_size,
            hasher: FixedState::with_seed(seed),
            table: HashTable::with_capacity(num_blocks),
            nodes: vec![VACANT; num_blocks],
            tokens: vec![0; num_blocks * block_size],
            next_uid: 1,
            num_groups: groups.len(),
            anchor: groups.anchor(),
            is_chained: !groups.is_sliding(groups.anchor()),
            attached: vec![BlockId::NULL; others * groups.len()],
            owners: vec![BlockId::NULL; others],
            num_attached: 0,
            roots: BTreeMap::new(),
            root_users: BTreeMap::new(),
        }
    }

    /// Blocks that hold a prefix.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.len() + self.num_attached
    }

    /// Tokens a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Whether no block holds a prefix.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// Roots in use.
    #[must_use]
    pub fn num_roots(&self) -> usize {
        self.roots.len()
    }

    /// The root of an adapter and tenant; counts one more user of it.
    pub fn acquire_root(&mut self, adapter: u32, salt: &[u8]) -> NodeUid {
        let key = (adapter, salt.to_vec());
        if let Some(&uid) = self.roots.get(&key) {
            self.use_root(uid);
            return uid;
        }
        let uid = NodeUid::root(self.next_uid);
        self.next_uid += 1;
        self.roots.insert(key.clone(), uid);
        self.root_users.insert(uid, (key, 1));
        uid
    }

    /// Count one user of a root less; the last one removes it.
    pub fn release_root(&mut self, root: NodeUid) {
        let Some((_, users)) = self.root_users.get_mut(&root) else { return };
        *users -= 1;
        if *users == 0
            && let Some((key, _)) = self.root_users.remove(&root)
        {
            self.roots.remove(&key);
        }
    }

    /// The hash of a node's key.
    #[must_use]
    pub fn hash(&self, parent: NodeUid, tokens: &[u32]) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        hasher.write_u64(parent.0);
        let mut pairs = tokens.chunks_exact(2);
        for pair in &mut pairs {
            hasher.write_u64(u64::from(pair[0]) | u64::from(pair[1]) << 32);
        }
        for &token in pairs.remainder() {
            hasher.write_u64(u64::from(token));
        }
        hasher.finish()
    }

    /// The block that holds these tokens after that parent.
    #[must_use]
    pub fn find(&self, parent: NodeUid, tokens: &[u32]) -> Option<(BlockId, NodeUid)> {
        let hash = self.hash(parent, tokens);
        let entry = self.table.find(hash, |entry| self.is(entry, parent, tokens))?;
        Some((entry.block, entry.uid))
    }

    /// Follow `tokens` from `node`, block by block, for at most `max_blocks`; blocks found are appended to `out`. The
    /// last node reached.
    pub fn walk(
        &self,
        mut node: NodeUid,
        tokens: &[u32],
        max_blocks: usize,
        out: &mut Vec<BlockId>,
    ) -> NodeUid {
        for chunk in tokens.chunks_exact(self.block_size).take(max_blocks) {
            let Some((block, uid)) = self.find(node, chunk) else { break };
            out.push(block);
            node = uid;
        }
        node
    }

    /// Index a block under a key that is not there yet; its node.
    ///
    /// # Panics
    /// When the block is indexed already.
    pub fn insert(&mut self, block: BlockId, parent: NodeUid, tokens: &[u32]) -> NodeUid {
        assert!(!self.contains(block), "an indexed block is never written");
        let hash = self.hash(parent, tokens);
        let uid = NodeUid(self.next_uid);
        self.next_uid += 1;
        let start = block.index() * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
        self.nodes[block.index()] = Node { uid, hash };
        let nodes = &self.nodes;
        self.table.insert_unique(hash, Entry { uid, parent, block }, |entry| {
            nodes[entry.block.index()].hash
        });
        if parent.is_root() {
            self.use_root(parent);
        }
        uid
    }

    /// Forget a block's prefix. True when it had one.
    pub fn remove(&mut self, block: BlockId) -> bool {
        if self.owner(block) != BlockId::NULL {
            return self.remove_attached(block);
        }
        let node = std::mem::replace(&mut self.nodes[block.index()], VACANT);
        if node.uid == NodeUid::NONE {
            return false;
        }
        if let Ok(entry) = self.table.find_entry(node.hash, |entry| entry.uid == node.uid) {
            let (entry, _) = entry.remove();
            if entry.parent.is_root() {
                self.release_root(entry.parent);
            }
        }
        true
    }

    /// Whether a block holds a prefix.
    #[must_use]
    pub fn contains(&self, block: BlockId) -> bool {
        self.nodes[block.index()].uid != NodeUid::NONE || self.owner(block) != BlockId::NULL
    }

    /// The node that a block of the anchor group holds.
    #[must_use]
    pub fn node(&self, anchor: BlockId) -> NodeUid {
        self.nodes[anchor.index()].uid
    }

    /// A group's block of the tokens that `anchor` holds; the null block when there is none.
    #[must_use]
    pub fn group_block(&self, anchor: BlockId, group: usize) -> BlockId {
        if group == self.anchor {
            return anchor;
        }
        self.attached[anchor.index() * self.num_groups + group]
    }

    /// Attach a group's block to the node of `anchor`, unless another block is attached already; the one that is.
    ///
    /// # Panics
    /// When the block is indexed elsewhere.
    pub fn attach(&mut self, anchor: BlockId, group: usize, block: BlockId) -> BlockId {
        let place = anchor.index() * self.num_groups + group;
        if self.attached[place] == BlockId::NULL {
            assert!(!self.contains(block), "an indexed block is never written");
            self.attached[place] = block;
            self.owners[block.index()] = anchor;
            self.num_attached += 1;
        }
        self.attached[place]
    }

    /// Undo `attach`; the block that was attached to the node of `anchor`.
    pub fn detach(&mut self, anchor: BlockId, group: usize) -> Option<BlockId> {
        let block = *self.attached.get(anchor.index() * self.num_groups + group)?;
        (block != BlockId::NULL && self.remove_attached(block)).then_some(block)
    }

    fn owner(&self, block: BlockId) -> BlockId {
        self.owners.get(block.index()).copied().unwrap_or(BlockId::NULL)
    }

    fn remove_attached(&mut self, block: BlockId) -> bool {
        let anchor = std::mem::replace(&mut self.owners[block.index()], BlockId::NULL);
        let start = anchor.index() * self.num_groups;
        let row = &mut self.attached[start..start + self.num_groups];
        for entry in row.iter_mut().filter(|entry| **entry == block) {
            *entry = BlockId::NULL;
        }
        self.num_attached -= 1;
        true
    }

    /// Check that every node hashes to its key and that every child's parent is there.
    ///
    /// # Errors
    /// Says what contradicts what.
    pub fn check(&self) -> Result<(), String> {
        let mut uids: Vec<NodeUid> =
            self.nodes.iter().map(|node| node.uid).filter(|&uid| uid != NodeUid::NONE).collect();
        uids.sort_unstable();
        if uids.len() != self.table.len() || uids.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(format!(
                "prefix cache: {} nodes and {} entries",
                uids.len(),
                self.table.len()
            ));
        }
        let mut first_blocks: BTreeMap<NodeUid, usize> = BTreeMap::new();
        for entry in &self.table {
            let tokens = self.block_tokens(entry.block);
            let node = self.nodes[entry.block.index()];
            if node.uid != entry.uid
                || node.hash != self.hash(entry.parent, tokens)
                || self.find(entry.parent, tokens) != Some((entry.block, entry.uid))
            {
                return Err(format!("prefix cache: {:?} is not found under its key", entry.block));
            }
            if entry.parent.is_root() {
                *first_blocks.entry(entry.parent).or_default() += 1;
            } else if self.is_chained && uids.binary_search(&entry.parent).is_err() {
                return Err(format!(
                    "prefix cache: {:?} is indexed and its parent is not",
                    entry.block
                ));
            }
        }
        self.check_attached()?;
        for (root, blocks) in first_blocks {
            if self.root_users.get(&root).is_none_or(|(_, users)| *users < blocks) {
                return Err(format!(
                    "prefix cache: {root:?} has {blocks} first blocks and fewer users"
                ));
            }
        }
        Ok(())
    }

    /// Check that attached blocks and their nodes know each other.
    fn check_attached(&self) -> Result<(), String> {
        let mut count = 0;
        for (i, &block) in self.attached.iter().enumerate() {
            let anchor = BlockId((i / self.num_groups) as u32);
            if block != BlockId::NULL {
                count += 1;
                if self.owner(block) != anchor || self.node(anchor) == NodeUid::NONE {
                    return Err(format!("prefix cache: {block:?} is attached to {anchor:?} alone"));
                }
            }
        }
        let owned = self.owners.iter().filter(|&&owner| owner != BlockId::NULL).count();
        if owned != count || count != self.num_attached {
            return Err(format!("prefix cache: {count} blocks are attached, {owned} have a node"));
        }
        Ok(())
    }

    fn use_root(&mut self, root: NodeUid) {
        if let Some((_, users)) = self.root_users.get_mut(&root) {
            *users += 1;
        }
    }

    fn block_tokens(&self, block: BlockId) -> &[u32] {
        let start = block.index() * self.block_size;
        &self.tokens[start..start + self.block_size]
    }

    fn is(&self, entry: &Entry, parent: NodeUid, tokens: &[u32]) -> bool {
        entry.parent == parent && self.block_tokens(entry.block) == tokens
    }
}
