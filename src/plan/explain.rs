//! Prints the candidates for a call, their predicted costs, the winner, and what selected it.

use super::algorithms::no_hierarchy;
use super::call_times::AutoChoice;
use super::ring_set::no_ring_set;
use super::{Candidate, Limits, Planner, Request, Tuning, candidates};
use crate::error::Result;
use crate::schedule::encoded_contributions;
use crate::types::{Algorithm, CodecSetting, CodecSpec};
use std::fmt::Write;

impl Planner {
    /// Returns a line that names the tuning table or the cost model that selected the winner; empty
    /// on host memory.
    fn source(&self, measured: &std::result::Result<(Candidate, Option<usize>), String>) -> String {
        match (measured, &self.tuning) {
            (Ok((_, Some(line))), Tuning::Table(table)) => format!(
                "  measured on {} x {} over {}, {}, table {} line {line}\n",
                table.header.gpu,
                table.header.ranks,
                table.header.links,
                table.header.date,
                table.name
            ),
            (Ok(_), _) => "  the way that is being measured\n".into(),
            (Err(why), _) if self.limits.gpu.is_some() => format!("  cost model: {why}\n"),
            (Err(_), _) => String::new(),
        }
    }

    /// Returns the candidates for `request`, as text. With `auto:` it lists the candidates with the
    /// codec and without it, the winner's list first, and the costs of both.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn explain(&self, request: &Request) -> Result<String> {
        let table = |request: &Request| {
            let [intra, codec] = self.codecs(request)?;
            let codecs = [intra.as_deref(), codec.as_deref()];
            let candidates = candidates(request, &self.limits, codecs)?;
            let measured = self.measured(request, codecs[1])?;
            let best = measured.as_ref().ok().map(|(candidate, _)| candidate);
            let text = explain(request, &self.limits, &candidates, best);
            Ok(text + &self.source(&measured))
        };
        if !request.codec.auto {
            return table(request);
        }
        let (coded, raw) = (
            self.best(request)?.0,
            self.best(&request.without_codec())?.0,
        );
        let AutoChoice {
            seconds: [with, without],
            pays,
        } = self.auto_choice(request, [coded.seconds, raw.seconds])?;
        let mut text = match pays {
            true => table(request)? + &table(&request.without_codec())?,
            false => table(&request.without_codec())? + &table(request)?,
        };
        let spec = request.codec.inter;
        text += &format!(
            "  auto:{spec}: raw {:.2} us, {spec} {:.2} us, so {} runs\n",
            without * 1e6,
            with * 1e6,
            if pays { spec } else { CodecSpec::RAW },
        );
        text += "  costs: ";
        text += &match (&self.limits.gpu, &self.limits.machine.measured) {
            (Some(_), _) => self.describe_call_times(request)?,
            (None, Some(measured)) => measured.describe(spec.kind),
            (None, None) => "constants; a communicator whose CINCH_CODEC is auto:NAME, or \
                             auto:raw, measures them when it is made"
                .into(),
        };
        text.push('\n');
        Ok(text)
    }
}

/// Returns the candidates as a table and marks the cheapest. A candidate that a tuning table
/// selected comes first and is marked instead.
pub fn explain(
    request: &Request,
    limits: &Limits,
    candidates: &[Candidate],
    measured: Option<&Candidate>,
) -> String {
    let best = candidates
        .iter()
        .map(|candidate| candidate.seconds)
        .min_by(f64::total_cmp)
        .filter(|_| measured.is_none());
    let candidates: Vec<&Candidate> = measured.into_iter().chain(candidates).collect();
    let mut text = heading(request, limits);
    let kernel = |kernel: &str, protocol: &str| match limits.gpu {
        Some(_) => format!("  {kernel:<8}  {protocol:<8}"),
        None => String::new(),
    };
    let names: Vec<String> = candidates.iter().map(|one| one.name()).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0).max(9);
    text += &format!("  {:<width$}", "algorithm");
    text += &kernel("kernel", "protocol");
    let errors: Vec<Option<f64>> = candidates
        .iter()
        .map(|one| error_factor(request, limits, one))
        .collect();
    let has_errors = errors.iter().any(Option::is_some);
    text += "  chunk(elements)  passes  channels  hops  sends  predicted(us)";
    text += match has_errors {
        true => "  rms error\n",
        false => "\n",
    };
    for (index, (candidate, name)) in candidates.iter().zip(names).enumerate() {
        let mark = match measured {
            Some(_) if index == 0 => " <- measured",
            _ if best == Some(candidate.seconds) => " <- cheapest",
            _ => "",
        };
        let error = match errors[index] {
            _ if !has_errors => String::new(),
            Some(factor) => format!("  {:>9}", format!("{factor:.2} e")),
            None => format!("  {:>9}", "-"),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {name:<width$}{}  {:>15}  {:>6}  {:>5}  {:>4}  {:>5}  {:>13.2}{error}{mark}",
            kernel(
                candidate.kernel.kernel.name(),
                candidate.kernel.protocol.name()
            ),
            candidate.geometry.chunk(),
            candidate.geometry.passes(),
            candidate.channels,
            candidate.hops.total(),
            candidate.counts.sends,
            candidate.seconds * 1e6,
        );
    }
    if has_errors {
        let spec = request.codec.inter;
        let _ = writeln!(
            text,
            "  e: relative RMS error of one encode by {spec}; the inputs of ranks are independent"
        );
    }
    // Users with several hosts, or with CINCH_ALGO=hierarchical, expect that algorithm in the
    // table, so its absence is explained.
    let expected = limits.groups().count() > 1 || limits.algorithm == Some(Algorithm::Hierarchical);
    if let Some(why) = no_hierarchy(request, limits).filter(|_| expected) {
        let _ = writeln!(text, "  no hierarchical: {why}");
    }
    if candidates
        .iter()
        .any(|one| one.algorithm == Algorithm::Ring)
    {
        for why in no_ring_set(request, limits) {
            let _ = writeln!(text, "  no ring-set: {why}");
        }
    }
    text
}

/// Returns the line above the table: the call and the ranks.
fn heading(request: &Request, limits: &Limits) -> String {
    let codec = CodecSetting {
        auto: false,
        ..request.codec
    };
    let groups = match limits.groups().count() {
        1 => String::new(),
        _ => format!(" on {}", limits.groups()),
    };
    format!(
        "{} of {} {}, codec {codec}, {} ranks{groups} over {}{}\n",
        request.collective,
        request.count,
        request.dtype,
        limits.nranks,
        limits.machine.transport,
        if limits.machine.load.is_crowded() {
            ", more ranks than cores"
        } else {
            ""
        },
    )
}

/// Largest number of ranks for which the growth of the error is computed: it needs the schedules of all ranks.
const MOST_RANKS_OF_ERROR: usize = 64;

/// Returns the relative RMS error of a sum of independent inputs, in units of the error of one encode between groups.
/// `None` if the call does not sum, if its codec is lossless, or if levels have different lossy codecs.
fn error_factor(request: &Request, limits: &Limits, candidate: &Candidate) -> Option<f64> {
    let codec = request.codec;
    let sums = request.collective.reduces() && limits.nranks <= MOST_RANKS_OF_ERROR;
    if !sums || !codec.inter.is_lossy() || limits.nranks < 2 {
        return None;
    }
    let algorithm = (candidate.algorithm, candidate.between);
    let pattern = super::pattern(request, limits, algorithm, candidate.rings);
    let [inside, between] = encoded_contributions(&pattern).ok()?;
    let inside = match candidate.algorithm {
        Algorithm::Hierarchical if !codec.intra.is_lossy() => 0.0,
        Algorithm::Hierarchical if codec.intra != codec.inter => return None,
        // All messages of flat algorithms have one codec.
        _ => inside,
    };
    Some(((inside + between) / limits.nranks as f64).sqrt())
}
