//! A device that carries out plans on a KV cache of plain tokens, and what a request must give when it is alone.
//!
//! The model is a hash of the whole history, read back through the block tables: a wrong block, a stale table entry or a
//! block recycled too early changes the answer.
#![allow(dead_code)]

pub(crate) mod bench;
pub(crate) mod engine;

use std::sync::Arc;

use octavo_core::step::layout::PARAM_LEN;
use octavo_core::text::TokenTable;
use octavo_core::{Config, Core, Layout, RequestSpec, StepPlan};

/// Ids below this are letters; a test's vocabulary.
pub(crate) const VOCAB: usize = 40;

/// The text of each token: a letter.
pub(crate) fn token_table() -> Arc<TokenTable> {
    let letters: Vec<Vec<u8>> = (0..VOCAB).map(letter).collect();
    Arc::new(TokenTable::new(letters.iter().map(Vec::as_slice), &[0; VOCAB], false))
}

fn letter(token: usize) -> Vec<u8> {
    vec![b'a' + (token % 26) as u8]
}

/// The first position that a query in a window sees; 0 is no window.
fn first_visible(window: usize, position: usize) -> usize {
    if window == 0 { 0 } else { (position + 1).saturating_sub(window) }
}

/// The token that follows a history, as each cache group sees it: the likeliest of those allowed; ties go to the lowest id.
fn model(
    history: impl Iterator<Item = i32>,
    seed: i32,
    sample: i32,
    biases: &[(i32, f32)],
    allowed: Option<&[bool]>,
) -> i32 {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ (seed as u64) << 8 ^ sample as u64;
    for token in history {
        state = (state ^ token as u64).wrapping_mul(0xd6e8_feb8_6659_fd93);
        state ^= state >> 32;
    }
    let first = (state % VOCAB as u64) as usize;
    let mut logits: Vec<f32> =
        (0..VOCAB).map(|token| -(((token + VOCAB - first) % VOCAB) as f32)).collect();
    for &(token, value) in biases {
        logits[token as usize] += value;
    }
    let allowed = |token: usize| allowed.is_none_or(|allowed| allowed[token]);
    (0..VOCAB)
        .filter(|&token| allowed(token))
        .max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)))
        .expect("some token is allowed") as i32
}

/// The tokens that a constrained answer may go on with, by its prompt and all it has drawn.
pub(crate) fn allowed(history: impl Iterator<Item = i32>) -> Vec<bool> {
    let hash = history
        .fold(17_u64, |state, token| (state ^ token as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    (0..VOCAB as u64)
        .map(|token| token == hash >> 40 & 31 || (hash >> token).is_multiple_of(8))
        .collect()
}

/// What the device holds.
#[derive(Clone)]
pub(crate) struct Device {
    layout: Layout,
    block_size: usize,
    /// Block tables by group * `max_num_seqs` + slot.
    tables: Vec<Vec<usize>>,
    last_token: Vec<i32>,
    params: Vec<[i32; PARAM_LEN]>,
    /// (token, position) of each cache slot.
    cache: Vec<(i32, i32)>,
    config: Config,
}

impl Device {
    pub(crate) fn new(core: &Core) -> Self {
        let config = core.config().clone();
        Self {
            layout: core.layout().clone(),
            block_size: config.block_size,
            tables: vec![
                vec![0; config.max_blocks_per_seq()];
                config.windows.len() * config.max_num_seqs
            ],
            last_token: vec![-1; config.max_num_seqs],
            params: vec![[0; PARAM_LEN]; config.max_num_seqs],
            cache: vec![(-1, -1); config.num_blocks * config.block_size],
            config,
        }
    }

    /// Carry out one step, its masked samples held to `masks`; the sampled ids.
    pub(crate) fn run(&mut self, plan: &StepPlan, arena: &[i32], masks: &[Vec<bool>]) -> Vec<i32> {
        let layout = self.layout.clone();
        let array = |name| layout.slice(arena, name);
        assert_eq!(array("counts"), plan.counts());
        for i in 0..plan.num_table_updates {
            let block = array("table_blocks")[i] as usize;
            assert!(block > 0 && block < self.config.num_blocks);
            self.tables[array("table_slots")[i] as usize][array("table_indices")[i] as usize] =
                block;
        }
        for i in 0..plan.num_param_updates {
            let values = &array("param_values")[i * PARAM_LEN..(i + 1) * PARAM_LEN];
            self.params[array("param_slots")[i] as usize].copy_from_slice(values);
        }
        self.check_scatters(plan, arena);
        let copies = plan.num_block_copies;
        let (sources, destinations) =
            (&array("copy_sources")[..copies], &array("copy_destinations")[..copies]);
        assert!(
            !destinations.iter().any(|block| sources.contains(block)),
            "copies may run at once"
        );
        let size = self.block_size;
        for i in 0..plan.num_block_copies {
            let (from, to) =
                (array("copy_sources")[i] as usize, array("copy_destinations")[i] as usize);
            self.cache.copy_within(from * size..(from + 1) * size, to * size);
        }
        self.write(plan, arena);
        self.check_windows(plan, arena);
        self.check_groups(plan, arena);
        assert_eq!(plan.num_masks, masks.len());
        let masked = &array("mask_logits")[..plan.num_masks];
        assert!(masked.is_sorted_by(|a, b| a < b), "a sample has one mask");
        (0..plan.num_logits)
            .map(|logit| {
                let mask = masked.iter().position(|&at| at as usize == logit);
                self.sample(logit, plan, arena, mask.map(|mask| masks[mask].as_slice()))
            })
            .collect()
    }

    fn write(&mut self, plan: &StepPlan, arena: &[i32]) {
        let layout = self.layout.clone();
        let array = |name| layout.slice(arena, name);
        assert!(plan.num_tokens <= self.config.max_num_batched_tokens);
        assert_eq!(array("query_start")[plan.num_rows] as usize, plan.num_tokens);
        let mut written = Vec::new();
        for row in 0..plan.num_rows {
            let slot = array("rows")[row] as usize;
            let (start, end) =
                (array("query_start")[row] as usize, array("query_start")[row + 1] as usize);
            assert!(start < end, "a row has tokens");
            if row < plan.num_decode_rows {
                assert_eq!((end - start, array("num_sampled")[row]), (1, 1));
            }
            for at in start..end {
                let position = array("positions")[at];
                assert_eq!(position, array("seq_lens")[row] - (end - at) as i32);
                let token = match array("token_ids")[at] {
                    -1 => self.last_token[slot],
                    token => token,
                };
                assert!(token >= 0, "a token from the device was sampled before");
                for group in 0..self.config.windows.len() {
                    let table = &self.tables[group * self.config.max_num_seqs + slot];
                    let block = table[position as usize / self.block_size];
                    let cell =
                        array("slot_mapping")[group * self.config.max_num_batched_tokens + at];
                    let offset = position as usize % self.block_size;
                    assert_eq!(cell as usize, block * self.block_size + offset);
                    self.cache[cell as usize] = (token, position);
                    written.push(cell as usize);
                }
            }
        }
        written.sort_unstable();
        assert!(written.windows(2).all(|pair| pair[0] < pair[1]), "two tokens in one cache slot");
    }

    /// A device may scatter all updates at once: none is given twice.
    fn check_scatters(&self, plan: &StepPlan, arena: &[i32]) {
        let array = |name, count: usize| &self.layout.slice(arena, name)[..count];
        let updates = plan.num_table_updates;
        let entries = array("table_slots", updates).iter().zip(array("table_indices", updates));
        let distinct = |places: Vec<(i32, i32)>| {
            let set: std::collections::BTreeSet<_> = places.iter().collect();
            set.len() == places.len()
        };
        assert!(distinct(entries.map(|(&slot, &index)| (slot, index)).collect()));
        for (name, count) in [
            ("rows", plan.num_rows),
            ("logits_slots", plan.num_logits),
            ("param_slots", plan.num_param_updates),
            ("copy_destinations", plan.num_block_copies),
        ] {
            assert!(
                distinct(array(name, count).iter().map(|&place| (0, place)).collect()),
                "{name}"
            );
        }
    }

    /// Every query of every row finds in each group's window the tokens of its own sequence.
    fn check_windows(&self, plan: &StepPlan, arena: &[i32]) {
        let array = |name| self.layout.slice(arena, name);
        for row in 0..plan.num_rows {
            let (slot, end) = (array("rows")[row] as usize, array("seq_lens")[row] as usize);
            let start = end - (array("query_start")[row + 1] - array("query_start")[row]) as usize;
            let mut known = vec![None; end];
            for (group, &window) in self.config.windows.iter().enumerate() {
                for (position, known) in
                    known.iter_mut().enumerate().skip(first_visible(window, start))
                {
                    let token = self.read(group, slot, position);
                    assert_eq!(*known.get_or_insert(token), token, "groups hold other tokens");
                }
            }
        }
    }

    /// Rows of a group read the same physical blocks, all of them full.
    fn check_groups(&self, plan: &StepPlan, arena: &[i32]) {
        let array = |name| self.layout.slice(arena, name);
        for group in 0..plan.num_groups {
            let starts = &array("group_starts")[group..=group + 1];
            let rows = &array("group_rows")[starts[0] as usize..starts[1] as usize];
            let blocks = array("group_blocks")[group] as usize;
            assert!(rows.len() > 1 && blocks >= self.config.group_min_blocks);
            let full = self.config.windows.iter().position(|&window| window == 0);
            let first =
                full.expect("groups of rows need full attention") * self.config.max_num_seqs;
            let table =
                |row: i32| &self.tables[first + array("rows")[row as usize] as usize][..blocks];
            for &row in rows {
                assert!((row as usize) < plan.num_decode_rows);
                assert!(blocks * self.block_size < array("seq_lens")[row as usize] as usize);
                assert_eq!(table(row), table(rows[0]));
            }
        }
    }

    /// The token that a group holds at a position of a slot's sequence.
    fn read(&self, group: usize, slot: usize, position: usize) -> i32 {
        let table = &self.tables[group * self.config.max_num_seqs + slot];
        let block = table[position / self.block_size];
        let (token, at) = self.cache[block * self.block_size + position % self.block_size];
        assert_eq!(at as usize, position, "the cache slot was written for another position");
        token
    }

    fn sample(
        &mut self,
        logit: usize,
        plan: &StepPlan,
        arena: &[i32],
        allowed: Option<&[bool]>,
    ) -> i32 {
        let layout = self.layout.clone();
        let array = |name| layout.slice(arena, name);
        let at = array("logits_rows")[logit];
        let row = (0..plan.num_rows)
            .find(|&row| array("query_start")[row + 1] > at)
            .expect("the row of a logit");
        assert_eq!(
            at + 1,
            array("query_start")[row + 1],
            "samples are drawn from a row's last token"
        );
        let reader = array("rows")[row] as usize;
        let len = array("seq_lens")[row] as usize;
        let windows = self.config.windows.iter().enumerate();
        let histories = windows.map(|(group, &window)| {
            (first_visible(window, len - 1)..len)
                .map(|position| self.read(group, reader, position))
                .collect()
        });
        let histories: Vec<Vec<i32>> = histories.collect();
        let biases: Vec<(i32, f32)> = (0..plan.num_biases)
            .filter(|&i| array("bias_logits")[i] as usize == logit)
            .map(|i| (array("bias_tokens")[i], f32::from_bits(array("bias_values")[i] as u32)))
            .collect();
        let tokens: std::collections::BTreeSet<i32> = biases.iter().map(|bias| bias.0).collect();
        assert_eq!(tokens.len(), biases.len(), "a logit is changed once");
        let slot = array("logits_slots")[logit] as usize;
        let params = &self.params[slot];
        let token = model(histories.into_iter().flatten(), params[7], params[9], &biases, allowed);
        self.last_token[slot] = token;
        token
    }
}

/// One answer: tokens, text, finish and stop reason as in a frame.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) tokens: Vec<i32>,
    pub(crate) text: String,
    pub(crate) finish: i32,
    pub(crate) stop: i32,
}

/// The answers of a request served alone, by the plain rules.
pub(crate) fn alone(spec: &RequestSpec, config: &Config, with_text: bool) -> Vec<Answer> {
    (0..spec.n as i32).map(|sample| alone_one(spec, config, sample, with_text)).collect()
}

fn alone_one(spec: &RequestSpec, config: &Config, sample: i32, with_text: bool) -> Answer {
    let mut history: Vec<i32> = spec.prompt.iter().map(|&token| token as i32).collect();
    let eos = if spec.ignore_eos { &[][..] } else { &config.eos_token_ids };
    let ends: Vec<i32> =
        eos.iter().chain(&spec.stop_token_ids).map(|&token| token as i32).collect();
    let limit = (history.len() + spec.max_tokens).min(config.max_model_len);
    let mut answer = Answer { stop: i32::MIN, ..Answer::default() };
    loop {
        let early = answer.tokens.len() < spec.min_tokens;
        let mut biases: Vec<(i32, f32)> = Vec::new();
        for &(token, value) in &spec.logit_bias {
            biases.push((token as i32, value));
        }
        if early {
            biases.extend(ends.iter().map(|&token| (token, f32::NEG_INFINITY)));
        }
        let allowed = spec.constrained.then(|| allowed(history.iter().copied()));
        let last = history.len() - 1;
        let visible =
            config.windows.iter().flat_map(|&window| &history[first_visible(window, last)..]);
        let token =
            model(visible.copied(), spec.sampling.seed as i32, sample, &biases, allowed.as_deref());
        history.push(token);
        answer.tokens.push(token);
        let may_stop = answer.tokens.len() > spec.min_tokens;
        if may_stop && ends.contains(&token) {
            answer.finish = 1;
            if spec.stop_token_ids.contains(&(token as u32)) {
                answer.stop = token;
            }
            if !spec.include_stop {
                break;
            }
        }
        if with_text {
            answer.text.push((b'a' + (token % 26) as u8) as char);
        }
        if answer.finish == 1 {
            break;
        }
        let found =
            spec.stop.iter().enumerate().filter(|(_, stop)| answer.text.as_bytes().ends_with(stop));
        let longest = found.max_by_key(|(i, stop)| (stop.len(), std::cmp::Reverse(*i)));
        if let Some((i, stop)) = longest.filter(|_| may_stop) {
            (answer.finish, answer.stop) = (1, -1 - i as i32);
            if !spec.include_stop {
                answer.text.truncate(answer.text.len() - stop.len());
            }
            break;
        }
        if history.len() >= limit {
            answer.finish = 2;
            break;
        }
    }
    if !with_text {
        answer.text.clear();
    }
    answer
}
