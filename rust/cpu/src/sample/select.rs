//! The candidates of top-k and top-p, without sorting the vocabulary.

use super::rows::{GROUP, Maxima};

/// Segments up to this length are sorted; longer ones are split first.
const SORTED: usize = 512;

/// A token and its logit, ordered by falling logit, then rising id.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) logit: f32,
    pub(super) token: u32,
}

impl Candidate {
    /// Rises with the rank.
    fn key(self) -> (u32, u32) {
        // Floats in whole-number order, turned around; -0 and 0 are the same.
        let bits = (self.logit + 0.0).to_bits();
        let rising = if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits };
        (!rising, self.token)
    }
}

/// Every token whose logit is at least `bound` and above -inf, by rising id.
pub(super) fn at_least(row: &[f32], maxima: Maxima<'_>, bound: f32, out: &mut Vec<Candidate>) {
    out.clear();
    let bound = bound.max(f32::MIN);
    for (group, lanes) in maxima.groups().enumerate() {
        if !lanes.iter().any(|&lane| lane >= bound) {
            continue;
        }
        let start = group * GROUP;
        for (i, &logit) in row[start..row.len().min(start + GROUP)].iter().enumerate() {
            if logit >= bound {
                out.push(Candidate { logit, token: (start + i) as u32 });
            }
        }
    }
}

/// The k likeliest tokens of a row, in no order; fewer where fewer are above -inf.
pub(super) fn top_k(row: &[f32], maxima: Maxima<'_>, k: usize, out: &mut Vec<Candidate>) {
    // The k-th largest maximum of parts of the row is at most the k-th largest logit.
    let mut lanes = maxima.lanes().to_vec();
    let bound = if k <= lanes.len() {
        *lanes.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
    } else {
        f32::MIN
    };
    at_least(row, maxima, bound, out);
    if out.len() > k {
        out.select_nth_unstable_by_key(k - 1, |c| c.key());
        out.truncate(k);
    }
}

/// Bring candidates into their order.
pub(super) fn sort(candidates: &mut [Candidate]) {
    candidates.sort_unstable_by_key(|c| c.key());
}

/// Keep the fewest of the likeliest candidates whose weights reach `mass`; at least one, in no order.
pub(super) fn nucleus(candidates: &mut Vec<Candidate>, mass: f64, weight: impl Fn(f32) -> f64) {
    let (mut first, mut end, mut reached) = (0, candidates.len(), 0.0);
    while end - first > SORTED {
        let middle = (end - first) / 2;
        candidates[first..end].select_nth_unstable_by_key(middle, |c| c.key());
        let middle = first + middle;
        let half: f64 = candidates[first..middle].iter().map(|c| weight(c.logit)).sum();
        if reached + half >= mass {
            end = middle;
        } else {
            reached += half;
            first = middle;
        }
    }
    sort(&mut candidates[first..end]);
    let mut kept = first;
    while kept < end && (reached < mass || kept == 0) {
        reached += weight(candidates[kept].logit);
        kept += 1;
    }
    candidates.truncate(kept.max(1));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nucleus_is_a_sorted_prefix() {
        let row: Vec<f32> =
            (0u32..5000).map(|i| (i.wrapping_mul(2_654_435_761) % 97) as f32).collect();
        let all: Vec<_> =
            (0..).zip(&row).map(|(token, &logit)| Candidate { logit, token }).collect();
        let mut sorted = all.clone();
        sort(&mut sorted);
        for mass in [0.0, 1.0, 700.0, 2500.5, 4999.5, 9999.0] {
            let mut kept = all.clone();
            nucleus(&mut kept, mass, |_| 1.0);
            sort(&mut kept);
            let expected = (mass.ceil() as usize).clamp(1, 5000);
            assert_eq!(kept.len(), expected);
            assert!(kept.iter().zip(&sorted).all(|(a, b)| a.token == b.token));
        }
    }
}
