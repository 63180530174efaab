//! The status as JSON, with the names and the nesting of NCCL 2.28 to 2.30.

use super::Versions;
use super::status::{COUNTED, async_error, count_of};
use cinch::recorder::{CommSnapshot, GatheredRank, JobSnapshot, MissingRank};
use cinch::sys::clock::local_time;
use cinch::sys::json_string::escaped;

/// Number that stands for an unknown version or GPU.
const UNKNOWN: i64 = -1;

/// Returns the state of a job.
pub(super) fn status(job: &JobSnapshot, versions: Versions) -> String {
    let communicators: Vec<String> = job.communicators().iter().map(communicator).collect();
    format!(
        "{{\n  \"nccl_version\": {},\n  \"cuda_runtime_version\": {UNKNOWN},\n  \
         \"cuda_driver_version\": {},\n  \"timestamp\": {},\n  \"communicators_count\": {},\n  \
         \"communicators\": [{}],\n  \"ras\": {{\"collection_time_sec\": {:.3}, \
         \"timeouts_count\": {}}}\n}}\n",
        escaped(&versions.nccl_text()),
        versions.driver.map_or(UNKNOWN, i64::from),
        escaped(&local_time()),
        communicators.len(),
        list(&communicators, "    "),
        job.elapsed.as_secs_f64(),
        job.unresponsive.len()
    )
}

/// Returns the elements of an array, one a line.
fn list(items: &[String], indent: &str) -> String {
    match items.is_empty() {
        true => String::new(),
        false => format!(
            "\n{indent}{}\n{}",
            items.join(&format!(",\n{indent}")),
            &indent[2..]
        ),
    }
}

fn communicator(comm: &CommSnapshot<'_>) -> String {
    let ranks: Vec<String> = comm.ranks.values().map(rank).collect();
    let missing: Vec<String> = comm.missing.iter().map(missing_rank).collect();
    // NCCL names the host and the process of the rank that made the id; rank 0 does in most programs.
    let (host, pid) = comm
        .label
        .ranks
        .first()
        .map_or((0, 0), |first| (digest(&first.host), first.pid));
    format!(
        "{{\"hash\": \"0x{:x}\", \"secondary_hash\": \"0x{host:x}:0x{pid:x}\", \"size\": {}, \
         \"ranks_count\": {}, \"missing_ranks_count\": {},\n      \"ranks\": [{}],\n      \
         \"missing_ranks\": [{}]}}",
        u64::from_be_bytes(comm.label.id),
        comm.label.ranks.len(),
        ranks.len(),
        missing.len(),
        list(&ranks, "        "),
        list(&missing, "        ")
    )
}

/// Returns FNV-1a of a text.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

fn rank(gathered: &GatheredRank<'_>) -> String {
    let GatheredRank { process, rank } = gathered;
    let gpu = rank.label.gpu;
    let counts: Vec<String> = COUNTED
        .iter()
        .map(|(name, collective)| format!("\"{name}\": {}", count_of(rank, *collective)))
        .collect();
    format!(
        "{{{}, \"status\": {{\"init_state\": 0, \"async_error\": {}, \"finalize_called\": {}, \
         \"destroy_flag\": {}, \"abort_flag\": {}}}, \"collective_counts\": {{{}}}}}",
        place(
            rank.label.rank,
            (&process.host, process.pid),
            gpu.map(|gpu| gpu.cuda),
            gpu.and_then(|gpu| gpu.nvml)
        ),
        async_error(rank) as i64,
        rank.is_closing,
        rank.is_destroyed,
        rank.is_aborted,
        counts.join(", ")
    )
}

fn missing_rank(missing: &MissingRank<'_>) -> String {
    format!(
        "{{{}, \"status\": {{\"unresponsive\": {}, \"considered_dead\": {}}}}}",
        place(
            missing.rank,
            (&missing.name.host, missing.name.pid),
            None,
            None
        ),
        missing.is_unresponsive,
        missing.is_dead
    )
}

fn place(rank: usize, (host, pid): (&str, u32), cuda: Option<u32>, nvml: Option<u32>) -> String {
    let number = |gpu: Option<u32>| gpu.map_or(UNKNOWN, i64::from);
    format!(
        "\"rank\": {rank}, \"host\": {}, \"pid\": {pid}, \"cuda_dev\": {}, \"nvml_dev\": {}",
        escaped(host),
        number(cuda),
        number(nvml)
    )
}
