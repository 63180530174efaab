//! Runs random operations over many communicators. Device memory must not grow meanwhile.

use crate::arena::context;
use crate::case::Case;
use crate::coded;
use crate::cover::{self, KERNELS, Rng};
use crate::harness::{Check, Setup, Stop, Verdict, ensure};
use crate::options::Options;
use crate::world::World;
use cinch::gpu::Context;
use cinch::testing::random_word;
use std::sync::Arc;
use std::time::Instant;

/// Number of communicators after which the driver has allocated the memory that it keeps for itself. At least
/// as many more communicators show whether memory still grows.
const WARM_UP: usize = 8;
/// Interval of comparisons with the host engine: encoded outputs are compared on the first of every
/// 4 communicators.
const SAMPLED: usize = 4;
/// Bytes that the driver may allocate after the first communicators, because its pools grow in
/// large steps.
const SLACK: usize = 32 << 20;

pub fn checks(options: &Options) -> Vec<Check> {
    let limit = options.soak().as_secs() + 300;
    let mut checks = vec![
        Check::new("soak/one-gpu", 1, |setup| soak(setup, 1)).within(limit),
        Check::new("soak/all-gpus", 2, |setup| soak(setup, setup.count())).within(limit),
    ];
    // A long soak runs only once: on all GPUs, or on the only GPU.
    if options.minutes > 0.0 {
        checks[0].name = "soak/one-gpu-alone".into();
        let alone = |setup: &Setup| match setup.count() {
            1 => soak(setup, 1),
            _ => Stop::skipped("soak/all-gpus takes the time"),
        };
        checks[0].run = Box::new(alone);
    }
    checks
}

fn soak(setup: &Setup, gpus: usize) -> Verdict {
    let length = setup.options.soak();
    let begin = Instant::now();
    let contexts = (0..gpus)
        .map(context)
        .collect::<Result<Vec<Arc<Context>>, _>>()?;
    let free = || -> cinch::Result<Vec<usize>> {
        let one = |context: &Arc<Context>| context.memory().map(|(free, _)| free);
        contexts.iter().map(one).collect()
    };
    let (mut worlds, mut ran) = (0, 0);
    let mut warm = free()?;
    while begin.elapsed() < length || worlds < 2 * WARM_UP {
        // Hashing the seed gives runs with neighbouring seeds different random choices.
        let mut rng = Rng::new(random_word(setup.options.seed, worlds as u64));
        let nranks = match gpus {
            1 => rng.pick(&[2, 3, 4, 5, 7, 8]),
            _ => rng.pick(&[2, gpus, gpus, gpus + 1]),
        };
        let mut world = World::new(setup, nranks, gpus);
        let kernel = rng.pick(&KERNELS);
        world.config.force_kernel(kernel);
        world.config.p2p_disable = rng.below(8) == 0;
        world.config.gpu_channels = rng.pick(&[Some(1), Some(3), Some(16), Some(64), None, None]);
        let most = if rng.below(6) == 0 { 1 << 20 } else { 50_000 };
        let mut cases = cover::random(&mut rng, nranks, 150, most);
        let coded = coded::cases(&mut rng, nranks, 1, most);
        // A tuning table for this machine's GPUs may influence the algorithm, and the host engine
        // has no such table. Only cases with a fixed algorithm are therefore compared.
        let asked = coded.iter().filter(|case| case.call.algorithm.is_some());
        let sample: Vec<Case> = asked.step_by(12).copied().collect();
        for case in coded.into_iter().step_by(4) {
            cases.insert(rng.below(cases.len()), case);
        }
        let protocol = super::cover::name(kernel);
        let which = format!(
            "world {worlds}: {nranks} ranks, {protocol}, {:?} channels, p2p {}",
            world.config.gpu_channels, !world.config.p2p_disable
        );
        let judged = world.judge(&cases);
        ran += judged.map_err(|stop| stop.context(&which))?;
        // Without this comparison, cases with coarse codecs or random bits would only reveal hangs
        // and crashes.
        if worlds % SAMPLED == 0 {
            let compared = coded::matches_host_engine(&world, &sample);
            compared.map_err(|stop| stop.context(&which))?;
            ran += sample.len();
        }
        worlds += 1;
        if worlds == WARM_UP {
            warm = free()?;
        }
    }
    // With fewer communicators, both memory readings would be taken at the same moment.
    ensure(worlds > WARM_UP, || format!("only {worlds} worlds"))?;
    let end = free()?;
    let grown = warm.iter().zip(&end);
    let grown = grown.map(|(warm, end)| warm.saturating_sub(*end)).max();
    let grown = grown.unwrap_or(0);
    ensure(grown <= SLACK, || {
        format!("{grown} bytes of device memory are gone after {worlds} worlds")
    })?;
    Ok(format!(
        "{ran} operations in {worlds} worlds, {:.1} min, {grown} bytes gone",
        begin.elapsed().as_secs_f64() / 60.0
    ))
}
