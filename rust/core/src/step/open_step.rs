//! Records of steps that are planned and not committed.

use crate::ids::SequenceId;

/// A row of a step that is not committed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OpenRow {
    pub(crate) id: SequenceId,
    /// Tokens of the sequence in the cache after the row.
    pub(crate) end: usize,
    pub(crate) num_sampled: usize,
}

/// A step that is not committed.
#[derive(Clone, Debug, Default)]
pub(crate) struct OpenStep {
    pub(crate) step: u64,
    pub(crate) rows: Vec<OpenRow>,
    /// The sequence of each sample, in logits order.
    pub(crate) samples: Vec<SequenceId>,
    /// Requests admitted for the first time.
    pub(crate) started: Vec<i64>,
}

impl OpenStep {
    pub(crate) fn with_capacity(rows: usize) -> Self {
        Self {
            step: 0,
            rows: Vec::with_capacity(rows),
            samples: Vec::with_capacity(rows),
            started: Vec::with_capacity(rows),
        }
    }

    pub(crate) fn clear(&mut self, step: u64) {
        self.step = step;
        self.rows.clear();
        self.samples.clear();
        self.started.clear();
    }
}
