//! Exact collectives: every collective, type and operation, with every algorithm and protocol,
//! compared with its definition.

use crate::coded;
use crate::cover::{self, KERNELS, RANKS, Rng};
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::options::Options;
use crate::world::World;
use cinch::plan::FUSED128_DTYPES;
use cinch::types::KernelProtocol;
use cinch::{Algorithm, Collective, ReduceOp};
use std::time::Duration;

pub fn checks(options: &Options) -> Vec<Check> {
    let mut checks = vec![Check::new("cover/every-pair", 0, |setup| {
        let (batches, covered, possible) = batches(setup);
        let cases: usize = batches.iter().map(|batch| batch.cases.len()).sum();
        let text = format!("{cases} cases cover {covered} of {possible} pairs of choices");
        ensure(covered == possible, || text.clone())?;
        Ok(text)
    })];
    for nranks in RANKS {
        for (place, protocol) in KERNELS.into_iter().enumerate() {
            let name = super::cover::name(protocol);
            let number = RANKS.iter().position(|&n| n == nranks).unwrap_or(0) * KERNELS.len();
            let check = Check::new(format!("raw/n{nranks}-{name}"), 1, move |setup| {
                batch(setup, number + place)
            });
            checks.push(check.within(options.either(60, 180)).also_on_host());
        }
    }
    // Some of these numbers of ranks exceed the number of GPUs, so ranks share GPUs.
    for (nranks, gpus) in [(2, 2), (3, 2), (8, 2), (4, 4), (6, 4), (8, 8), (12, 8)] {
        let check = Check::new(format!("raw/n{nranks}-gpus{gpus}"), gpus, move |setup| {
            random_cases(setup, nranks, gpus, false)
        });
        // With many GPUs the driver takes most of the time of a check, for example 28 s with 4
        // GPUs.
        checks.push(check.within(options.either(180, 600)));
    }
    for (nranks, gpus) in [(2, 1), (5, 1), (8, 2), (4, 4), (8, 8)] {
        let name = format!("raw/p2p-disabled-n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| {
            random_cases(setup, nranks, gpus, true)
        });
        checks.push(check);
    }
    // 12 ranks are more peers than a fused kernel polls at once.
    for nranks in [2, 5, 12] {
        let check = Check::new(format!("raw/same-bits-n{nranks}"), 1, move |setup| {
            same_bits(setup, nranks)
        });
        checks.push(check.within(120).also_on_host());
    }
    // compute-sanitizer runs this check; see scripts/test-gpu. It lets only one kernel run on a GPU at a
    // time, so each rank has its own GPU.
    checks.push(Check::new("sanitize/threads-n2-gpus2", 2, sanitized).within(280));
    let alone = Check::new("raw/n1", 1, |setup| random_cases(setup, 1, 1, false));
    checks.push(alone.also_on_host());
    checks
}

fn batches(setup: &Setup) -> (Vec<cover::Batch>, usize, usize) {
    cover::batches(setup.options.seed, setup.options.either(1, 4))
}

fn batch(setup: &Setup, number: usize) -> Verdict {
    let batch = batches(setup).0.swap_remove(number);
    let mut world = World::new(setup, batch.nranks, 1);
    world.config.force_kernel(batch.kernel);
    let judged = world.judge(&batch.cases);
    let count = judged.map_err(|stop| stop.context(batch.name()))?;
    Ok(format!("{count} cases"))
}

/// Runs small cases with each kernel. The timeout allows for compute-sanitizer, which slows kernels
/// a hundredfold.
fn sanitized(setup: &Setup) -> Verdict {
    let mut rng = Rng::new(setup.options.seed);
    let mut ran = 0;
    for protocol in KERNELS {
        let cases = cover::random(&mut rng, 2, 12, 3000);
        let mut world = World::new(setup, 2, 2);
        world.config.timeout = Duration::from_secs(60);
        world.config.force_kernel(protocol);
        ran += world.judge(&cases)?;
    }
    Ok(format!("{ran} cases"))
}

/// Fused kernels must give outputs with the bits of the schedules that they replace.
fn same_bits(setup: &Setup, nranks: usize) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ 0xb175);
    let cases = cover::fused_cases(&mut rng, nranks);
    let run = |protocol, channels| {
        let mut world = World::new(setup, nranks, 1);
        world.config.force_kernel(Some(protocol));
        world.config.gpu_channels = channels;
        coded::outputs(&world, &cases, None)
    };
    let (fused, limits) = run(KernelProtocol::FUSED_LL, None)?;
    // If the fused kernel refused a message, another protocol would run and would only be compared
    // with itself.
    if let Some(gpu) = limits.gpu {
        let largest = cases
            .iter()
            .map(|case| case.call.count * case.call.dtype.size());
        let largest = largest.max().unwrap_or(0);
        let most = gpu.oneshot_bytes.min(gpu.lines_bytes);
        ensure(largest <= most && gpu.ll128, || {
            format!("{largest} bytes are no message of a fused kernel, or not in lines")
        })?;
    }
    for (case, done) in cases.iter().zip(&fused) {
        case.judge(&case.inputs(nranks), done, 0.0)
            .map_err(Stop::Wrong)?;
    }
    // With a single channel, one thread block must loop over the message several times.
    let others = [
        (KernelProtocol::FUSED_LL, Some(1)),
        (KernelProtocol::FUSED_LL128, None),
        (KernelProtocol::FUSED_LL128, Some(1)),
        (KernelProtocol::LL, None),
        (KernelProtocol::SIMPLE, None),
    ];
    for (protocol, channels) in others {
        let (others, _) = run(protocol, channels)?;
        for (number, case) in cases.iter().enumerate() {
            // In a direct all_reduce the owner of an element adds its own product before rounding. The chunk
            // sizes decide which rank owns an element, so they must match.
            let call = &case.call;
            let rounds = call.dtype.is_float() && call.dtype.size() <= 2;
            let is_owned = call.collective == Collective::AllReduce
                && call.algorithm == Some(Algorithm::Direct)
                && matches!(call.op, ReduceOp::PreMulSum(_));
            let cuts_alike = match protocol {
                KernelProtocol::FUSED_LL => true,
                KernelProtocol::FUSED_LL128 => FUSED128_DTYPES.contains(&call.dtype),
                _ => false,
            };
            if !cuts_alike && rounds && is_owned {
                continue;
            }
            for (rank, other) in others[number].iter().enumerate() {
                case.same_numbers(&fused[number][rank].output, &other.output, rank, nranks)
                    .map_err(|why| {
                        Stop::Wrong(format!("{why} (expected is the output of {protocol})"))
                    })?;
            }
        }
    }
    Ok(format!("{} cases", cases.len()))
}

/// Runs random cases with each kernel, `nranks` ranks on `gpus` GPUs.
fn random_cases(setup: &Setup, nranks: usize, gpus: usize, p2p_disable: bool) -> Verdict {
    let mut rng = Rng::new(setup.options.seed ^ (nranks * 16 + gpus) as u64);
    let mut ran = 0;
    for protocol in KERNELS {
        let number = setup.options.either(100, 400);
        let cases = cover::random(&mut rng, nranks, number, 1 << 20);
        let mut world = World::new(setup, nranks, gpus);
        world.config.p2p_disable = p2p_disable;
        world.config.force_kernel(protocol);
        let name = super::cover::name(protocol);
        ran += world.judge(&cases).map_err(|stop| stop.context(name))?;
    }
    Ok(format!("{ran} cases"))
}
