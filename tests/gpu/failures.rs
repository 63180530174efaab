//! Tests failures of ranks and calls. Each must give an error that names the rank at fault, end
//! every kernel, and leave the streams usable.

use crate::arena::Arena;
use crate::harness::{Check, Setup, Stop, Verdict, ensure, say};
use crate::models::number;
use crate::ranks::Ranks;
use crate::world::{World, expect_error};
use cinch::comm::Call;
use cinch::engine::gpu::signature_hash;
use cinch::testing::Random;
use cinch::types::{Fused, Kernel, Protocol, ResolvedCall};
use cinch::{
    Algorithm, CallTuning, CodecSetting, CodecSpec, Collective, Communicator, DType, Error,
    ErrorKind, ReduceOp, UniqueId,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const COUNT: usize = 10_000;
/// Promised time limits: until survivors report a killed rank, and until an abort ends a waiting
/// kernel.
const KILLED: Duration = Duration::from_secs(2);
const ABORTED: Duration = Duration::from_millis(200);
/// Time limit of every other wait.
const PATIENCE: Duration = Duration::from_secs(20);

pub fn checks() -> Vec<Check> {
    let mut checks = Vec::new();
    for (nranks, gpus) in [(4, 1), (2, 2), (8, 2), (4, 4), (8, 8)] {
        let name = format!("fail/kill-n{nranks}-gpus{gpus}");
        let check = Check::new(name, gpus, move |setup| {
            kill(setup, &World::new(setup, nranks, gpus), gpus)
        });
        checks.push(check.within(180));
    }
    for (nranks, gpus) in [(3, 1), (2, 2), (8, 2), (4, 4), (8, 8)] {
        type Run = fn(&World) -> Verdict;
        let runs: [(&str, Run); 5] = [
            ("abort", abort),
            ("never-calls", never_calls),
            ("counts-differ", counts_differ),
            ("types-differ", types_differ),
            ("collectives-differ", collectives_differ),
        ];
        for (name, run) in runs {
            let name = format!("fail/{name}-n{nranks}-gpus{gpus}");
            let check = Check::new(name, gpus, move |setup| {
                run(&World::new(setup, nranks, gpus))
            });
            checks.push(check);
        }
    }
    checks.push(Check::new("fail/equal-flags", 1, equal_flags));
    checks
}

/// Number of random pairs of small calls of which those are run whose flags agree.
const PAIRS: usize = 20_000;

/// Returns the bits of the signature's hash that an ll flag has, for an all_reduce of `count` fp32 elements.
fn flag_bits(count: usize, algorithm: Algorithm) -> u64 {
    let call = ResolvedCall {
        collective: Collective::AllReduce,
        dtype: DType::F32,
        op: ReduceOp::Sum,
        count,
        root: 0,
        peer: 0,
        codec: CodecSetting::RAW,
        algorithm: None,
        tuning: CallTuning::AUTO,
        tensor: None,
        feedback: None,
        fused: Fused::ALONE,
    };
    let signature = call.signature(algorithm, CodecSpec::RAW, 0);
    signature_hash(signature.words()) >> 52
}

/// Two ranks make small calls of different counts whose messages have equal flags in ll: both report the mismatch.
/// Calls with unequal flags wait for each other, so they need no run.
fn equal_flags(setup: &Setup) -> Verdict {
    let mut random = Random::new(setup.options.seed);
    let mut runs = 0;
    for algorithm in [Algorithm::OneShot, Algorithm::Direct] {
        let pairs = (0..PAIRS).map(|_| [(); 2].map(|()| 1 + random.below(5000)));
        let equal = pairs.filter(|&[one, other]| {
            one != other && flag_bits(one, algorithm) == flag_bits(other, algorithm)
        });
        for [one, other] in equal {
            for kernel in [Kernel::Fused, Kernel::Schedule] {
                let mut world = World::new(setup, 2, 1);
                world.config.timeout = Duration::from_millis(700);
                world.config.algorithm = Some(algorithm);
                world.config.protocol = Some(Protocol::Ll);
                world.config.kernel = Some(kernel);
                let words = [one, other].map(|count| count.to_string());
                let calls = [one, other].map(|count| sum(DType::F32, count));
                differ(&world, calls[0], calls[1], [&words[0], &words[1]])
                    .map_err(|stop| stop.context(format!("{algorithm} {kernel} {words:?}")))?;
                runs += 1;
            }
        }
    }
    ensure(runs > 0, || "no pair has equal flags".into())?;
    Ok(format!(
        "{runs} runs of pairs with equal flags among {} pairs",
        2 * PAIRS
    ))
}

fn queue(comm: &Communicator, arena: &Arena, call: &Call) -> Result<(), Error> {
    let bytes = call.count * call.dtype.size();
    let buffers = arena.buffers((0, bytes), (8 * COUNT, bytes), arena.stream()?)?;
    comm.call_on(call, buffers).map(drop)
}

/// Waits until the communicator reports an error.
fn wait_for_error(comm: &Communicator) -> Result<Error, Stop> {
    let begin = Instant::now();
    loop {
        if let Some(error) = comm.async_error() {
            return Ok(error);
        }
        if begin.elapsed() > PATIENCE {
            return Stop::wrong(format!("rank {} got no error", comm.rank()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits for the stream, then checks that it still runs work.
fn usable(arena: &Arena) -> Result<(), Stop> {
    let stream = arena.stream()?;
    stream.wait(PATIENCE)?;
    arena.memory()?.fill(0xa5, stream)?;
    stream.wait(PATIENCE)?;
    let mut found = [0; 64];
    arena.read(0, &mut found)?;
    ensure(found == [0xa5; 64], || "the stream sets no memory".into())
}

/// Checks that a further call on a failed communicator returns the same error.
fn stays_failed(comm: &Communicator, arena: &Arena, error: &Error) -> Result<(), Stop> {
    match queue(comm, arena, &sum(DType::F32, COUNT)) {
        Err(again) if again.kind() == error.kind() => Ok(()),
        other => Stop::wrong(format!("a failed communicator takes a call: {other:?}")),
    }
}

fn sum(dtype: DType, count: usize) -> Call {
    Call::new(Collective::AllReduce, dtype, count)
}

/// Runs `body` as every rank and returns the results by rank, like [`World::run`] but without
/// `finalize`. No rank closes its communicator before `body` has returned on all ranks.
fn failing<R: Send>(
    world: &World,
    body: impl Fn(&Communicator, &Arena) -> Result<R, Stop> + Sync,
) -> Result<Vec<R>, Stop> {
    let arenas = world.arenas(16 * COUNT)?;
    let gate = std::sync::Barrier::new(world.nranks());
    let results = std::sync::Mutex::new(Vec::new());
    let ran = world.run(|comm| -> Result<(), Stop> {
        let result = body(comm, &arenas[comm.rank()]);
        if result.is_err() {
            comm.abort();
        }
        if let Ok(mut all) = results.lock() {
            all.push((comm.rank(), result));
        }
        gate.wait();
        // An error keeps `World::run` from calling `finalize`, which a failed communicator refuses.
        Stop::wrong("")
    });
    drop(ran);
    let mut all = results.into_inner().unwrap_or_default();
    all.sort_by_key(|(rank, _)| *rank);
    ensure(all.len() == world.nranks(), || {
        "a rank could not join".into()
    })?;
    all.into_iter()
        .map(|(rank, result)| result.map_err(|stop| stop.context(format!("rank {rank}"))))
        .collect()
}

/// The last rank never makes the call, and another thread of rank 0 aborts the communicator.
pub fn abort(world: &World) -> Verdict {
    let last = world.nranks() - 1;
    let times = failing(world, |comm, arena| {
        if comm.rank() == last {
            let error = wait_for_error(comm)?;
            return expect_error(&error, ErrorKind::Aborted, &["abort"]).map(|()| Duration::ZERO);
        }
        queue(comm, arena, &sum(DType::F32, COUNT))?;
        std::thread::sleep(Duration::from_millis(300));
        ensure(!arena.stream()?.is_idle()?, || {
            "the kernel did not wait".into()
        })?;
        let begin = Instant::now();
        if comm.rank() == 0 {
            std::thread::scope(|scope| scope.spawn(|| comm.abort()).join())
                .map_err(|_| Stop::Wrong("abort panicked".into()))?;
            comm.wait_stopped(PATIENCE)?;
            ensure(comm.is_idle() && arena.stream()?.is_idle()?, || {
                "the wait for the kernel was over before it".into()
            })?;
        }
        while !arena.stream()?.is_idle()? {
            ensure(begin.elapsed() < PATIENCE, || "the kernel stays".into())?;
        }
        let took = begin.elapsed();
        let error = wait_for_error(comm)?;
        expect_error(&error, ErrorKind::Aborted, &["rank 0", "aborted"])?;
        usable(arena)?;
        stays_failed(comm, arena, &error)?;
        // Only rank 0's clock starts at the abort. The other ranks learn of the abort by a message
        // and started their clocks earlier or later.
        Ok(if comm.rank() == 0 {
            took
        } else {
            Duration::ZERO
        })
    })?;
    ensure(times[0] <= ABORTED, || {
        format!("the kernel ended {:?} after the abort", times[0])
    })?;
    Ok(format!("freed after {:?}", times[0]))
}

pub fn never_calls(world: &World) -> Verdict {
    let mut world = world.clone();
    world.config.timeout = Duration::from_millis(700);
    let last = world.nranks() - 1;
    let texts = failing(&world, |comm, arena| {
        if comm.rank() != last {
            queue(comm, arena, &sum(DType::F32, COUNT))?;
        }
        let error = wait_for_error(comm)?;
        // With 3 or more ranks, a rank may wait for a rank that itself waits. The error may then
        // name either of them.
        let name = match comm.nranks() {
            2 => format!("rank {last}"),
            _ => "rank ".into(),
        };
        expect_error(&error, ErrorKind::Timeout, &["CINCH_TIMEOUT", "0.7", &name])?;
        usable(arena)?;
        stays_failed(comm, arena, &error)?;
        Ok(error.message().to_string())
    })?;
    Ok(texts[0].chars().take(100).collect())
}

/// Rank 1 makes the call `odd`; all other ranks make the call `most`.
fn differ(world: &World, most: Call, odd: Call, words: [&str; 2]) -> Verdict {
    let texts = failing(world, |comm, arena| {
        let call = if comm.rank() == 1 { odd } else { most };
        let queued = queue(comm, arena, &call);
        let error = wait_for_error(comm)?;
        if let Err(refused) = queued {
            ensure(refused.kind() == error.kind(), || {
                format!("{refused}, {error}")
            })?;
        }
        expect_error(&error, ErrorKind::Mismatch, &[words[0], words[1], "rank 1"])?;
        usable(arena)?;
        stays_failed(comm, arena, &error)?;
        Ok(error.message().to_string())
    })?;
    Ok(texts[0].chars().take(100).collect())
}

pub fn counts_differ(world: &World) -> Verdict {
    let (a, b) = (sum(DType::F32, COUNT), sum(DType::F32, COUNT - 7));
    differ(world, a, b, ["10000", "9993"])
}

fn types_differ(world: &World) -> Verdict {
    let (a, b) = (sum(DType::F32, COUNT), sum(DType::I32, COUNT));
    differ(world, a, b, ["f32", "i32"])
}

fn collectives_differ(world: &World) -> Verdict {
    let b = Call::new(Collective::Broadcast, DType::F32, COUNT);
    differ(
        world,
        sum(DType::F32, COUNT),
        b,
        ["all_reduce", "broadcast"],
    )
}

fn unix_time() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default()
}

/// Kills a rank process while all ranks make calls.
pub fn kill(setup: &Setup, world: &World, gpus: usize) -> Verdict {
    let nranks = world.nranks();
    let rounds = setup.options.either(2, 5);
    let mut worst = Duration::ZERO;
    for round in 0..rounds {
        let victim = (round * 3 + 1) % nranks;
        let took = kill_one(setup, world, gpus, victim);
        let took = took.map_err(|stop| stop.context(format!("rank {victim} is killed")))?;
        worst = worst.max(took);
    }
    ensure(worst <= KILLED, || {
        format!("a survivor knew after {worst:?}")
    })?;
    Ok(format!("{rounds} kills, known after {worst:?} at most"))
}

fn kill_one(setup: &Setup, world: &World, gpus: usize, victim: usize) -> Result<Duration, Stop> {
    let nranks = world.nranks();
    // Words of a task contain no spaces: host numbers are joined by commas, and a dash stands for
    // no hosts.
    let hosts: Vec<String> = world.hosts.iter().map(usize::to_string).collect();
    let hosts = match hosts.is_empty() {
        true => "-".into(),
        false => hosts.join(","),
    };
    let id = UniqueId::create_for_one_host(&world.config)?;
    let tasks =
        (0..nranks).map(|rank| format!("die {rank} {nranks} {gpus} {hosts} {}", id.to_hex()));
    let mut ranks = Ranks::start(&setup.options, tasks)?;
    let all: Vec<usize> = (0..nranks).collect();
    ranks.wait_for("working", &all, Duration::from_secs(60))?;
    std::thread::sleep(Duration::from_millis(150));
    let pid = ranks.children[victim].id();
    let killed = unix_time();
    ranks.children[victim].kill()?;
    ranks.children[victim].wait()?;
    let survivors: Vec<usize> = all.into_iter().filter(|&rank| rank != victim).collect();
    let errors = ranks.wait_for("error", &survivors, PATIENCE)?;
    let mut worst = Duration::ZERO;
    for (rank, said) in survivors.iter().zip(&errors) {
        let (at, text) = said.split_once(' ').unwrap_or_default();
        let named = text.starts_with("Remote ")
            && text.contains(&format!("rank {victim} "))
            && text.contains(&format!("pid {pid}"));
        ensure(named, || format!("rank {rank} reports {text}"))?;
        let at = Duration::from_nanos(at.parse().unwrap_or(u64::MAX));
        worst = worst.max(at.saturating_sub(killed));
    }
    ranks.wait_for("usable", &survivors, PATIENCE)?;
    Ok(worst)
}

/// Makes calls in a rank process until the communicator fails.
pub fn die(setup: &Setup, words: &[&str]) -> Verdict {
    let [rank, nranks, gpus, hosts, id] = words else {
        return Stop::wrong("die RANK NRANKS GPUS HOSTS ID");
    };
    let (rank, nranks, gpus) = (number(rank)?, number(nranks)?, number(gpus)?);
    let world = match *hosts {
        "-" => World::new(setup, nranks, gpus),
        hosts => {
            let hosts: Result<Vec<usize>, Stop> = hosts.split(',').map(number).collect();
            World::on_hosts(setup, &hosts?, gpus)
        }
    };
    let arena = Arena::new(world.gpus[rank], 16 * COUNT)?;
    let id = UniqueId::from_hex(id)?;
    let comm = Communicator::init(&id, rank, nranks, world.config_of(rank))?;
    let reported = AtomicBool::new(false);
    let error = loop {
        let queued = queue(&comm, &arena, &sum(DType::F32, COUNT));
        if let Err(error) = queued {
            break error;
        }
        arena.stream()?.wait(PATIENCE)?;
        if !reported.swap(true, Ordering::Relaxed) {
            say("working ");
        }
    };
    let (now, kind) = (unix_time().as_nanos(), error.kind());
    say(&format!("error {now} {kind:?} {}", error.message()).replace('\n', " "));
    usable(&arena)?;
    say("usable ");
    drop(comm);
    Ok(String::new())
}
