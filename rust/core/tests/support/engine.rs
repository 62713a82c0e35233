//! An engine around the core: a device, steps in flight, and the answers that came out.
#![allow(clippy::unwrap_used, reason = "a harness fails by panicking")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use octavo_core::{Config, Core, RequestSpec, StepPlan};

use super::{Answer, Device, allowed, alone, token_table};

/// An engine: the core, the device, the steps in flight and what came out.
pub(crate) struct Engine {
    pub(crate) core: Core,
    device: Device,
    arena: Vec<i32>,
    in_flight: VecDeque<(StepPlan, Vec<i32>)>,
    depth: usize,
    with_text: bool,
    specs: BTreeMap<i64, RequestSpec>,
    answers: BTreeMap<(i64, i32), Answer>,
    started: BTreeSet<i64>,
}

impl Engine {
    pub(crate) fn new(config: Config, depth: usize, with_text: bool) -> Self {
        let core = Core::new(config, with_text.then(token_table)).unwrap();
        let device = Device::new(&core);
        let arena = vec![-7; core.layout().arena_len()];
        Self {
            core,
            device,
            arena,
            in_flight: VecDeque::new(),
            depth,
            with_text,
            specs: BTreeMap::new(),
            answers: BTreeMap::new(),
            started: BTreeSet::new(),
        }
    }

    pub(crate) fn submit(&mut self, spec: &RequestSpec) {
        if self.core.submit(spec.clone()).is_ok() {
            self.specs.insert(spec.request_id, spec.clone());
            for sample in 0..spec.n as i32 {
                self.answers.insert(
                    (spec.request_id, sample),
                    Answer { stop: i32::MIN, ..Answer::default() },
                );
            }
        }
    }

    pub(crate) fn abort(&mut self, id: i64) {
        if self.core.abort(id) {
            self.specs.remove(&id);
        }
        assert!(!self.core.abort(id));
    }

    /// Plan and launch, if fewer than two steps are open; whether there was something to run.
    pub(crate) fn launch(&mut self) -> bool {
        if self.in_flight.len() == 2 {
            return false;
        }
        self.arena.fill(-7);
        let plan = self.core.plan(&mut self.arena).unwrap();
        self.core.check_invariants().unwrap();
        if let Some(plan) = plan {
            let masks: Vec<Vec<bool>> =
                self.core.masked().iter().map(|&(id, sample)| self.mask(id, sample)).collect();
            let sampled = self.device.run(&plan, &self.arena, &masks);
            self.in_flight.push_back((plan, sampled));
        }
        plan.is_some()
    }

    /// Launch, then commit what is older than `depth`; false when there was nothing to do.
    pub(crate) fn step(&mut self) -> bool {
        let keep = if self.launch() { self.depth } else { 0 };
        let worked = !self.in_flight.is_empty();
        while self.in_flight.len() > keep {
            let (plan, sampled) = self.in_flight.pop_front().unwrap();
            self.commit(&plan, &sampled);
            self.core.check_invariants().unwrap();
        }
        worked
    }

    /// What an answer may go on with, by the tokens that came out of it so far.
    fn mask(&self, id: i64, sample: u32) -> Vec<bool> {
        let spec = &self.specs[&id];
        assert!(spec.constrained);
        let prompt = spec.prompt.iter().map(|&token| token as i32);
        allowed(prompt.chain(self.answers[&(id, sample as i32)].tokens.iter().copied()))
    }

    fn commit(&mut self, plan: &StepPlan, sampled: &[i32]) {
        let frame = self.core.commit(plan.step, sampled).unwrap();
        for &id in &frame.started {
            assert!(self.started.insert(id), "request {id} started twice");
        }
        let mut start = 0;
        for event in 0..frame.len() {
            let end = frame.text_ends[event] as usize;
            let key = (frame.request_ids[event], frame.sample_indices[event]);
            assert!(self.specs.contains_key(&key.0), "an event of an aborted request");
            let answer = self.answers.get_mut(&key).unwrap();
            assert_eq!(answer.finish, 0, "an event after the end");
            assert!(self.started.contains(&key.0), "an event before the start");
            assert_eq!(sampled[frame.logit_indices[event] as usize], frame.token_ids[event]);
            answer.tokens.push(frame.token_ids[event]);
            answer.text.push_str(std::str::from_utf8(&frame.text[start..end]).unwrap());
            answer.finish = frame.finish_reasons[event];
            answer.stop = frame.stop_reasons[event];
            start = end;
        }
    }

    /// Run to the end; everything must have ended well and been given back.
    pub(crate) fn drain(&mut self) {
        let mut steps = 0;
        while self.core.has_work() {
            assert!(self.step(), "work is left and nothing runs: {:?}", self.core.stats());
            steps += 1;
            assert!(steps < 20_000, "no end: {:?}", self.core.stats());
        }
        let stats = self.core.stats();
        assert_eq!((stats.waiting, stats.deferred, stats.running, stats.blocks_used), (0, 0, 0, 0));
        assert_eq!(stats.blocks_free, stats.blocks_total);
        for (&(id, sample), answer) in &self.answers {
            if let Some(spec) = self.specs.get(&id) {
                let expected = &alone(spec, self.core.config(), self.with_text)[sample as usize];
                assert_eq!(answer, expected, "request {id} answer {sample}");
            }
        }
    }
}
