//! Connects GPU ranks in every process model, and writes every peer buffer. Runs on the GPUs of this machine,
//! with several ranks on each; without a driver or without kernels it prints that it skips.

#![allow(unsafe_code)] // kernels are launched on addresses

use super::child;
use cinch::bootstrap::{ControlPlane, OutOfBand};
use cinch::gpu::probe::Probe;
use cinch::gpu::{Context, Device, Driver, kernels};
use cinch::gpu_links::{GpuLinks, LinkClass, PeerPath, connect};
use cinch::sync::Fault;
use cinch::transport::ConnectContext;
use cinch::{Config, Error, ErrorKind, Result, UniqueId};
use std::collections::BTreeMap;
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time after which a process of ranks exits with an error.
const WORLD_TIMEOUT: Duration = Duration::from_secs(60);

/// A rank's process and GPU, both numbered from 0.
type RankGpu = (usize, usize);

#[test]
fn ranks_in_every_process_model_write_all_peer_buffers() {
    let gpus = match Driver::load().and_then(|driver| driver.device_count()) {
        Ok(gpus) => gpus as usize,
        Err(error) => return println!("skipped: {}", error.message()),
    };
    if let kernels::State::Missing { why } = kernels::STATE {
        return println!("skipped: no kernels in this build: {why}");
    }
    let all: Vec<usize> = (0..gpus.min(8)).collect();
    let mut worlds: Vec<(&str, Vec<RankGpu>)> = vec![
        ("alone", vec![(0, 0)]),
        ("threads on one GPU", vec![(0, 0); 5]),
        ("processes on one GPU", vec![(0, 0), (1, 0), (2, 0)]),
        ("both on one GPU", vec![(0, 0), (0, 0), (1, 0), (1, 0)]),
    ];
    if gpus > 1 {
        let threads = all.iter().map(|&gpu| (0, gpu)).collect();
        let processes = all.iter().map(|&gpu| (gpu, gpu)).collect();
        let mixed = all.iter().map(|&gpu| (gpu % 2, gpu)).collect();
        let crowded = all.iter().flat_map(|&gpu| [(0, gpu), (1, gpu)]).collect();
        worlds.push(("one process, all GPUs", threads));
        worlds.push(("a process for each GPU", processes));
        worlds.push(("two processes, half of the GPUs each", mixed));
        worlds.push(("two processes, all GPUs each", crowded));
    } else {
        println!("skipped: worlds of several GPUs, there is one");
    }
    for (name, ranks) in &worlds {
        for settings in ["", "CINCH_P2P_DISABLE=1"] {
            println!("-- {name} {settings}");
            world(ranks, settings, false);
        }
    }
    if gpus > 1 {
        println!("-- a process for each GPU, which sees no other");
        let ranks: Vec<RankGpu> = all.iter().map(|&gpu| (gpu, gpu)).collect();
        world(&ranks, "", true);
    }
}

/// Starts the processes of all ranks, which connect and check each other's data.
fn world(rank_gpus: &[RankGpu], settings: &str, hidden: bool) {
    let id = UniqueId::create(&Config::default()).expect("an id");
    let mut processes: BTreeMap<usize, Vec<String>> = BTreeMap::new();
    for (rank, &(process, gpu)) in rank_gpus.iter().enumerate() {
        let visible = if hidden { 0 } else { gpu };
        let ranks = processes.entry(process).or_default();
        ranks.push(format!("{rank}:{visible}"));
    }
    let start = |(_, ranks): (&usize, &Vec<String>)| {
        let ranks = ranks.join(",");
        let task = format!("{} {} {ranks}", id.to_hex(), rank_gpus.len());
        let mut command = child::rank(&[], "gpu_links", &task);
        command.stdout(Stdio::piped());
        if let Some((name, value)) = settings.split_once('=') {
            command.env(name, value);
        }
        if hidden {
            let rank: usize = ranks.split(':').next().unwrap().parse().unwrap();
            command.env("CUDA_VISIBLE_DEVICES", rank_gpus[rank].1.to_string());
        }
        command.spawn().expect("a process")
    };
    // The rendezvous of the id is in this process.
    let children: Vec<_> = processes.iter().map(start).collect();
    let mut failed = false;
    for child in children {
        let done = child.wait_with_output().expect("its end");
        let output = String::from_utf8_lossy(&done.stdout);
        for line in output.lines().filter(|line| line.starts_with("rank ")) {
            println!("   {line}");
        }
        failed |= !done.status.success();
    }
    id.cancel();
    assert!(!failed, "a process failed");
}

/// Runs the ranks of one process.
pub fn rank_process(task: &str) {
    std::thread::spawn(|| {
        std::thread::sleep(WORLD_TIMEOUT);
        println!("rank process: still there at the end of its lifetime");
        std::process::exit(3);
    });
    let words: Vec<&str> = task.split(' ').collect();
    let id = UniqueId::from_hex(words[0]).expect("an id");
    let nranks: usize = words[1].parse().unwrap();
    let ranks: Vec<(usize, u32)> = words[2]
        .split(',')
        .map(|rank| rank.split_once(':').unwrap())
        .map(|(rank, gpu)| (rank.parse().unwrap(), gpu.parse().unwrap()))
        .collect();
    let outcome: Vec<Result<()>> = std::thread::scope(|scope| {
        let rank = |&(rank, gpu): &(usize, u32)| {
            let id = &id;
            scope.spawn(move || run_rank(id, rank, nranks, gpu))
        };
        let threads: Vec<_> = ranks.iter().map(rank).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| thread.join().unwrap();
        threads.into_iter().map(join).collect()
    });
    let failures: Vec<Error> = outcome.into_iter().filter_map(Result::err).collect();
    for error in &failures {
        println!("rank failed: {error}");
    }
    if !failures.is_empty() {
        std::process::exit(1);
    }
}

fn run_rank(id: &UniqueId, rank: usize, nranks: usize, gpu: u32) -> Result<()> {
    let config = Config::from_env()?;
    let fault = Fault::new();
    let exchange = ControlPlane::join(id, rank, nranks, &config, fault.clone())?;
    let gpu = Context::primary(&Device::at(&Driver::load()?, gpu)?)?;
    exchange.barrier()?;
    let begin = Instant::now();
    let connected = connect(
        &ConnectContext {
            exchange: &*exchange,
            config: &config,
            fault: &fault,
            deadline: begin + config.init_timeout,
            place: cinch::topology::RankPlace::Unknown,
            sys: std::path::Path::new(cinch::sys::numa::SYS),
            verbs: None,
        },
        &gpu,
    );
    let links = connected.inspect_err(|error| exchange.announce(error))?;
    let took = begin.elapsed();
    if rank == 0 {
        let classes: Vec<String> = links
            .paths
            .iter()
            .flatten()
            .map(|path| path.class().to_string())
            .collect();
        println!(
            "rank 0 of {nranks} connected in {:.1} ms: {}; {} bytes on the GPU, {} pinned",
            took.as_secs_f64() * 1e3,
            classes.join(", "),
            links.device_bytes,
            links.pinned_bytes
        );
    }
    let checked = check(&links, &gpu, &config, &*exchange);
    checked.inspect_err(|error| exchange.announce(error))?;
    links.unmap();
    exchange.barrier()?;
    drop(links);
    assert_eq!(gpu.driver().ipc_mappings(), 0, "a mapping is left");
    exchange.leave();
    Ok(())
}

/// Writes a pattern to all outboxes of this rank, and compares all its inboxes with their writers' patterns.
fn check(
    links: &GpuLinks,
    gpu: &Arc<Context>,
    config: &Config,
    exchange: &dyn OutOfBand,
) -> Result<()> {
    let (rank, nranks) = (links.rank, links.nranks());
    let wrong = |what: String| Error::new(ErrorKind::Internal, what);
    if config.p2p_disable != links.paths.iter().flatten().all(in_host_memory) && nranks > 1 {
        return Err(wrong(format!("rank {rank}: {:?}", links.paths)));
    }
    if links.device_bytes > config.buffer_bytes || (nranks > 1 && !agreed(links, exchange)?) {
        return Err(wrong(format!("rank {rank}: {links:?}")));
    }
    let probe = Probe::new(gpu)?;
    let words = links.shape.bytes() as u64 / 8;
    let seed = |from: usize, to: usize| (from * nranks + to) as u64;
    let others = || (0..nranks).filter(|&peer| peer != rank);
    for to in others() {
        // SAFETY: `links` keep the peer buffer mapped. Only this rank writes it, and its reader waits for the
        // barrier.
        unsafe { probe.fill(links.outbox[to], words, seed(rank, to))? };
    }
    exchange.barrier()?;
    for from in others() {
        // SAFETY: `links` keep the peer buffer mapped, and its writer has passed the barrier.
        let found = unsafe { probe.wrong_words(links.inbox[from], words, seed(from, rank))? };
        if found > 0 {
            return Err(wrong(format!(
                "{found} of {words} words from rank {from} are wrong at rank {rank}"
            )));
        }
    }
    exchange.barrier()
}

fn in_host_memory(path: &PeerPath) -> bool {
    path.class() == LinkClass::Host
}

/// Returns whether all ranks agree on the slowest link.
fn agreed(links: &GpuLinks, exchange: &dyn OutOfBand) -> Result<bool> {
    let all = exchange.all_gather(links.slowest.name().as_bytes())?;
    Ok(all.iter().all(|other| *other == all[0]))
}
