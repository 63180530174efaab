//! `--explain-hosts`: prints which algorithms would run on a cluster that need not exist, and
//! verifies their schedules.

use super::options::BenchOptions;
use super::row::{call_of, keeps_scales};
use super::workload::Workload;
use crate::{FAILURE, USAGE};
use cinch::codec;
use cinch::comm::Call;
use cinch::config::{CodecPolicy, CommFacts};
use cinch::cpu::Isa;
use cinch::plan::{Candidate, Limits, MachineFacts, Planner, Request, candidates};
use cinch::schedule::{self, Groups, Schedule, SchedulePattern};
use cinch::transport::{self, HostLoad};
use cinch::types::TransportKind;
use cinch::{Algorithm, Config};
use std::io::Write;
use std::time::Instant;

/// All ranks' schedules are verified if one pass has at most this many steps over all ranks.
const PROVED_STEPS: usize = 20_000_000;

/// Prints each row's candidate algorithms, and the result of verifying their schedules.
///
/// # Errors
/// Returns an exit code and an error message about an impossible option or a wrong schedule.
pub fn main(
    options: &BenchOptions,
    config: &Config,
    (nranks, hosts): (usize, Groups),
    out: &mut impl Write,
) -> crate::ExitResult {
    let workload = Workload::new(options, nranks).map_err(|sentence| (USAGE, sentence))?;
    let policy = CodecPolicy::new(config, CommFacts::first(nranks, hosts.count()));
    let policy = match hosts.count() {
        1 => policy.on_groups(1),
        _ => policy,
    };
    let failure = |error: cinch::Error| (FAILURE, error.to_string());
    for row in &workload.rows {
        let call = Call {
            // Codecs that keep scales between calls need a tensor name. The value does not matter
            // here, as in a benchmark.
            tensor: keeps_scales(row).then_some(0),
            ..call_of(row, 0, nranks)
        };
        let request = call.under(&policy, nranks).map_err(failure)?;
        let text = explain(&request, config, nranks, &hosts).map_err(failure)?;
        // A write error is ignored: it means that the reader has closed the output.
        let _ = out.write_all(text.as_bytes());
    }
    Ok(0)
}

/// Returns the limits by which every rank of a communicator of `nranks` ranks on `hosts` selects
/// algorithms.
///
/// # Errors
/// Returns an invalid-argument error if the slots of that many ranks exceed `CINCH_BUFFER_BYTES`.
pub fn limits(config: &Config, nranks: usize, hosts: &Groups) -> cinch::Result<Limits> {
    let between = match hosts.count() {
        1 => TransportKind::Shm,
        _ => TransportKind::Tcp,
    };
    Ok(Limits {
        nranks,
        // With many ranks the slots are smaller than the setting; with too many ranks this call
        // fails.
        slot_bytes: transport::slot_bytes(config, nranks)?,
        slots: config.slots,
        channels: config.channels,
        algorithm: config.algorithm,
        machine: MachineFacts {
            transport: config.transport.unwrap_or(between),
            inside: config.transport.unwrap_or(TransportKind::Shm),
            load: HostLoad::LIGHT,
            measured: None,
        },
        hosts: hosts.clone(),
        topology: None,
        gpu: None,
    })
}

fn explain(
    request: &Request,
    config: &Config,
    nranks: usize,
    hosts: &Groups,
) -> cinch::Result<String> {
    let limits = limits(config, nranks, hosts)?;
    let since = Instant::now();
    let mut text = Planner::new(limits.clone(), 0, Isa::Scalar).explain(request)?;
    text += &format!("  predicted in {:.2} s\n", since.elapsed().as_secs_f64());
    let codecs =
        [request.codec.intra, request.codec.inter].map(|spec| codec::build(spec, Isa::Scalar));
    let [intra, inter] = codecs;
    let (intra, inter) = (intra?, inter?);
    for candidate in candidates(request, &limits, [intra.as_deref(), inter.as_deref()])? {
        text += &prove(&candidate, request, &limits)?;
    }
    Ok(text)
}

/// Generates all ranks' schedules of a candidate and verifies them symbolically, if there are few
/// enough steps. Otherwise generates only one rank's schedule.
fn prove(candidate: &Candidate, request: &Request, limits: &Limits) -> cinch::Result<String> {
    let pattern = SchedulePattern {
        root: request.root,
        peer: request.peer,
        groups: limits.hosts.clone(),
        between: candidate.between,
        rings: candidate.rings.count(),
        ..SchedulePattern::flat(request.collective, candidate.algorithm, limits.nranks)
    };
    let since = Instant::now();
    let one = pattern.schedule(limits.nranks / 2)?;
    let generated = since.elapsed().as_secs_f64();
    let name = candidate.name();
    let steps = one.steps.len() * limits.nranks;
    if steps > PROVED_STEPS {
        return Ok(format!(
            "  {name}: one rank's {} steps generated in {generated:.3} s; not verified for all ranks, which \
             have about {steps} steps\n",
            one.steps.len()
        ));
    }
    let schedules: Vec<Schedule> = (0..limits.nranks)
        .map(|rank| pattern.schedule(rank))
        .collect::<cinch::Result<_>>()?;
    let generated = since.elapsed().as_secs_f64();
    let since = Instant::now();
    // A ring repeats a single stage, so 2 passes cover all its cases. Other algorithms overlap as
    // many passes as they have stages.
    let passes = match candidate.algorithm {
        Algorithm::Ring => 2,
        _ => (one.stages + 2).min(candidate.geometry.passes()).max(2),
    };
    let depth = schedule::VerifyLimits {
        slots: limits.slots,
        passes,
    };
    let proof = schedule::verify(&pattern, &schedules, depth)?;
    Ok(format!(
        "  {name}: all {} ranks generated in {generated:.2} s; {passes} passes at {} slots proved in \
         {:.2} s: {} messages a pass, {} hops\n",
        limits.nranks,
        limits.slots,
        since.elapsed().as_secs_f64(),
        proof.messages,
        proof.hops
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::parsed;
    use cinch::config::Origin;

    fn said(line: &str) -> Result<String, (i32, String)> {
        said_under(&Config::default(), line)
    }

    fn said_under(config: &Config, line: &str) -> Result<String, (i32, String)> {
        let options: BenchOptions = parsed(line).map_err(|sentence| (USAGE, sentence))?;
        let (hosts, ranks) = options.explain_hosts.unwrap();
        let mut out = Vec::new();
        let shape = (hosts * ranks, Groups::even_hosts(hosts, ranks));
        main(&options, config, shape, &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn absent_hosts_are_explained_and_their_schedules_verified() {
        let text = said("all_reduce -b 64M --explain-hosts 16x4 --codec dynamic8").unwrap();
        assert!(
            text.contains("64 ranks on 16 hosts of 4 ranks over tcp"),
            "{text}"
        );
        for name in ["tree", "direct", "hierarchical/tree", "hierarchical/direct"] {
            let line = format!("  {name}: all 64 ranks generated");
            assert!(text.contains(&line), "{name}: {text}");
        }
        assert!(
            !text.contains("/ring"),
            "a lossy codec in a ring of hosts: {text}"
        );
        let text = said("send_recv -b 1M --explain-hosts 2x2").unwrap();
        // The message goes from one rank to another, so there is one hop.
        assert!(text.contains("1 messages a pass, 1 hops"), "{text}");
        let text = said("all_to_all -b 1M --explain-hosts 3x2").unwrap();
        assert!(text.contains("no hierarchical: all_to_all"), "{text}");
        for bad in ["0x8", "8", "8x", "1048576x2"] {
            assert!(said(&format!("all_reduce --explain-hosts {bad}")).is_err());
        }
    }

    /// The size of a slot depends on the number of ranks. Too many ranks are an error, as they
    /// could not connect.
    #[test]
    fn slot_size_depends_on_the_number_of_ranks() {
        let mut config = Config::default();
        let slots = |config: &Config, nranks| {
            limits(config, nranks, &Groups::ONE).map(|limits| limits.slot_bytes)
        };
        assert_eq!(slots(&config, 16).unwrap(), 128 << 10);
        assert_eq!(slots(&config, 64).unwrap(), 32 << 10);
        assert_eq!(slots(&config, 512).unwrap(), 4 << 10);
        // A chunk is 32 KiB of raw elements, as no more fit into a slot.
        let text = said("all_reduce -b 64M --explain-hosts 16x4 --algo direct").unwrap();
        let line = text.lines().find(|line| line.contains("<- cheapest"));
        let chunk = line.and_then(|line| line.split_whitespace().nth(1));
        assert_eq!(chunk, Some("8192"), "{text}");
        let (code, sentence) = said("all_reduce -b 1M --explain-hosts 128x8").unwrap_err();
        assert_eq!(code, FAILURE);
        assert!(sentence.contains("CINCH_BUFFER_BYTES"), "{sentence}");
        let more = ("CINCH_BUFFER_BYTES", "1G");
        config.set(more.0, more.1, Origin::Environment).unwrap();
        assert!(slots(&config, 1024).is_ok());
    }

    /// The settings decide the codec of a call, as they do where calls run.
    #[test]
    fn settings_decide_the_explained_codec() {
        let codec = |settings: &[(&str, &str)], line: &str| {
            let mut config = Config::default();
            for (name, value) in settings {
                config.set(name, value, Origin::Environment).unwrap();
            }
            let text = said_under(&config, &format!("{line} --explain-hosts 2x2")).unwrap();
            let of = text.split("codec ").nth(1).unwrap();
            of.split([',', ':', ' ']).next().unwrap().to_string()
        };
        let linear = ("CINCH_CODEC", "linear8");
        let gathers = ("CINCH_CODEC_COLLECTIVES", "all_gather");
        let least = ("CINCH_CODEC_MIN_BYTES", "1M");
        for (settings, line, expected) in [
            (&[linear][..], "all_reduce -b 1M", "linear8"),
            (&[linear], "all_gather -b 1M", "raw"),
            (&[linear, gathers], "all_gather -b 1M", "linear8"),
            (&[linear, gathers], "all_reduce -b 1M", "raw"),
            (&[linear], "all_reduce -b 1M -o max", "raw"),
            (
                &[("CINCH_CODEC", "off")],
                "all_reduce -b 1M --codec linear8",
                "raw",
            ),
            // The size of a reduce_scatter counts all blocks of its input.
            (&[linear, least], "reduce_scatter -b 1M", "linear8"),
            (&[linear, least], "reduce_scatter -b 512K", "raw"),
            // A codec with tensor scales needs tensor names, which these calls lack.
            (
                &[("CINCH_CODEC", "linear8:tensor=10")],
                "all_reduce -b 1M",
                "raw",
            ),
        ] {
            assert_eq!(codec(settings, line), expected, "{settings:?} {line}");
        }
    }
}
