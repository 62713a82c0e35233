//! Operations on a core as values, and what it decided as text: for golden traces, replays and bug reports.

use std::fmt::Write;

use crate::core::Core;
use crate::error::Result;
use crate::request::RequestSpec;
use crate::step::plan::StepPlan;

/// One call of a core.
#[derive(Clone, Debug, PartialEq)]
pub enum Operation {
    /// Queue a request.
    Submit(Box<RequestSpec>),
    /// Plan a step.
    Plan,
    /// Commit the oldest open step with these samples.
    Commit(Vec<i32>),
    /// Abort a request.
    Abort(i64),
    /// Forget the free cached blocks.
    ResetPrefixCache,
}

/// Apply an operation. What came of it, as text that is the same for the same decisions.
pub fn apply(core: &mut Core, operation: &Operation, arena: &mut [i32]) -> String {
    let mut outcome = || -> Result<String> {
        Ok(match operation {
            Operation::Submit(spec) => {
                core.submit(spec.as_ref().clone())?;
                format!("submit {}\n", spec.request_id)
            }
            Operation::Plan => match core.plan(arena)? {
                Some(plan) => describe(core, &plan, arena),
                None => "nothing to plan\n".into(),
            },
            Operation::Commit(sampled) => {
                let step = core.oldest_open().map_or(0, |open| open.0);
                core.commit(step, sampled)?;
                describe_output(core, step)
            }
            Operation::Abort(id) => format!("abort {id}: {}\n", core.abort(*id)),
            Operation::ResetPrefixCache => format!("forgot {} blocks\n", core.reset_prefix_cache()),
        })
    };
    outcome().unwrap_or_else(|error| format!("refused: {error}\n"))
}

/// A step as text, a line a row, then what else the device has to do.
#[must_use]
pub fn describe(core: &Core, plan: &StepPlan, arena: &[i32]) -> String {
    let array = |name| core.layout().slice(arena, name);
    let mut out =
        format!("step {}: {} tokens in {} rows\n", plan.step, plan.num_tokens, plan.num_rows);
    let (starts, mut logit) = (array("query_start"), 0);
    for row in 0..plan.num_rows {
        let (start, end) = (starts[row] as usize, starts[row + 1] as usize);
        let kind = if row < plan.num_decode_rows { "decode" } else { "prompt" };
        let _ = write!(
            out,
            "  slot {} {kind} positions {}..{} tokens {:?} to {:?}",
            array("rows")[row],
            array("positions")[start],
            array("seq_lens")[row],
            &array("token_ids")[start..end],
            &array("slot_mapping")[start..end],
        );
        for _ in 0..array("num_sampled")[row] {
            let _ = write!(out, " -> slot {}", array("logits_slots")[logit]);
            logit += 1;
        }
        out.push('\n');
    }
    let mut list = |name: &str, count: usize, entry: &dyn Fn(usize) -> String| {
        if count > 0 {
            let entries: Vec<String> = (0..count).map(entry).collect();
            let _ = writeln!(out, "  {name} {}", entries.join(" "));
        }
    };
    list("tables", plan.num_table_updates, &|i| {
        format!(
            "{}[{}]={}",
            array("table_slots")[i],
            array("table_indices")[i],
            array("table_blocks")[i]
        )
    });
    list("copies", plan.num_block_copies, &|i| {
        format!("{}->{}", array("copy_sources")[i], array("copy_destinations")[i])
    });
    list("params", plan.num_param_updates, &|i| array("param_slots")[i].to_string());
    list("biases", plan.num_biases, &|i| {
        let value = f32::from_bits(array("bias_values")[i] as u32);
        format!("{}:{}{value:+}", array("bias_logits")[i], array("bias_tokens")[i])
    });
    list("masks", plan.num_masks, &|i| {
        let (request, sample) = core.masked()[i];
        format!("{}:{request}.{sample}", array("mask_logits")[i])
    });
    list("groups", plan.num_groups, &|i| {
        let starts = array("group_starts");
        let rows = &array("group_rows")[starts[i] as usize..starts[i + 1] as usize];
        format!("{rows:?}x{}", array("group_blocks")[i])
    });
    out
}

fn describe_output(core: &Core, step: u64) -> String {
    let (output, mut out) = (core.output(), format!("commit {step}\n"));
    if !output.started.is_empty() {
        let _ = writeln!(out, "  started {:?}", output.started);
    }
    for event in 0..output.len() {
        let _ = write!(
            out,
            "  request {}.{} token {}",
            output.request_ids[event], output.sample_indices[event], output.token_ids[event]
        );
        match (output.finish_reasons[event], output.stop_reasons[event]) {
            (0, _) => {}
            (1, i32::MIN) => out.push_str(" ends: end token"),
            (1, token @ 0..) => drop(write!(out, " ends: stop token {token}")),
            (1, text) => drop(write!(out, " ends: stop text {}", -1 - text)),
            _ => out.push_str(" ends: length"),
        }
        out.push('\n');
    }
    out
}
