//! Unfinished requests, and the slab that holds them.

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::ids::{NodeUid, SequenceId, Slot};
use crate::request::RequestSpec;
use crate::step::layout::PARAM_LEN;

/// A request with an unfinished answer.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// Without the prompt, which its first sequence holds.
    pub(crate) spec: RequestSpec,
    pub(crate) num_prompt: usize,
    /// Tokens that end an answer.
    pub(crate) end_tokens: Vec<u32>,
    /// Place in the queue, and the order of submission that breaks ties.
    pub(crate) key: i64,
    pub(crate) arrival: u64,
    /// Tokens of prompt and output together, at most.
    pub(crate) token_limit: usize,
    /// Root of its prefixes.
    pub(crate) root: NodeUid,
    /// Prompt tokens found in the prefix cache at first admission.
    pub(crate) cached_tokens: Option<u32>,
    /// Its unfinished sequences.
    pub(crate) sequences: Vec<SequenceId>,
    /// Whether the prompt was computed and the answers forked.
    pub(crate) forked: bool,
    /// Slots reserved for the answers that are forked when the prompt is complete.
    pub(crate) reserved: Vec<Slot>,
    /// Logit changes of samples below the minimum length, where end tokens are banned.
    pub(crate) early_biases: Vec<(u32, f32)>,
}

impl Request {
    /// Logit changes of a sample.
    pub(crate) fn biases(&self, below_minimum: bool) -> &[(u32, f32)] {
        if below_minimum { &self.early_biases } else { &self.spec.logit_bias }
    }

    /// The parameter record of one answer, as the plan arrays lay it out.
    pub(crate) fn param_values(&self, sample_index: u32) -> [i32; PARAM_LEN] {
        let s = &self.spec.sampling;
        let bits = |value: f32| value.to_bits() as i32;
        let neutral = (1.0_f32, 0.0_f32, 0.0_f32);
        let penalties = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != neutral;
        let flags = i32::from(penalties) | i32::from(s.logprobs.is_some()) << 1;
        [
            bits(s.temperature),
            bits(s.top_p),
            bits(s.min_p),
            bits(s.repetition_penalty),
            bits(s.presence_penalty),
            bits(s.frequency_penalty),
            s.top_k as i32,
            s.seed as i32,
            (s.seed >> 32) as i32,
            sample_index as i32,
            flags,
            s.logprobs.unwrap_or(0) as i32,
            self.num_prompt as i32,
            self.spec.adapter as i32,
            0,
            0,
        ]
    }
}

/// All requests by their place; places are reused, last freed first.
#[derive(Clone, Debug)]
pub(crate) struct Requests {
    slab: Vec<Option<Request>>,
    vacant: Vec<u32>,
    /// Place of each request, by the caller's number.
    by_id: HashMap<i64, u32, FixedState>,
}

impl Requests {
    pub(crate) fn new(hash_seed: u64) -> Self {
        let by_id = HashMap::with_hasher(FixedState::with_seed(hash_seed));
        Self { slab: Vec::new(), vacant: Vec::new(), by_id }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// The place of the request with the caller's number.
    pub(crate) fn find(&self, request_id: i64) -> Option<u32> {
        self.by_id.get(&request_id).copied()
    }

    pub(crate) fn get(&self, place: u32) -> Option<&Request> {
        self.slab[place as usize].as_ref()
    }

    pub(crate) fn add(&mut self, request: Request) -> u32 {
        let place = self.vacant.pop().unwrap_or_else(|| {
            self.slab.push(None);
            self.slab.len() as u32 - 1
        });
        self.by_id.insert(request.spec.request_id, place);
        self.slab[place as usize] = Some(request);
        place
    }

    pub(crate) fn remove(&mut self, place: u32) -> Option<Request> {
        let request = self.slab[place as usize].take()?;
        self.vacant.push(place);
        self.by_id.remove(&request.spec.request_id);
        Some(request)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Request> {
        self.slab.iter().flatten()
    }
}

impl std::ops::Index<u32> for Requests {
    type Output = Request;

    fn index(&self, place: u32) -> &Request {
        self.slab[place as usize].as_ref().expect("a sequence's request lives as long as it")
    }
}

impl std::ops::IndexMut<u32> for Requests {
    fn index_mut(&mut self, place: u32) -> &mut Request {
        self.slab[place as usize].as_mut().expect("a sequence's request lives as long as it")
    }
}
