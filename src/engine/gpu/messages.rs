//! Sends and receives of a group between two collectives: decides which of them share a launch.
//!
//! Both ends must put a message into the same launch, so the key of a launch consists of numbers that both
//! ends know. These are the message's index among the messages of its pair, the distance of the ranks, and
//! the kernel.

use super::launch::KeptMemory;
use super::launch::copy;
use super::pack::WorkBuffer;
use super::{GpuCall, GpuEngine, PreparedCall};
use crate::error::Result;
use crate::gpu::Stream;
use crate::types::SIGNATURE_WORDS;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// Largest number of queues of a GPU for the launches of streams (`CUDA_DEVICE_MAX_CONNECTIONS`).
const MOST_QUEUES: usize = 32;
/// Longest wait for the work of a stream, which may be the user's.
const LAUNCH_PATIENCE: Duration = Duration::from_secs(3600);

impl GpuEngine {
    /// Returns whether the GPU has a queue for each of its ranks. Ranks without queues of their own cannot replay graphs side
    /// by side.
    pub fn has_queues(&self) -> bool {
        let gpu = self.planner.limits().gpu.as_ref();
        gpu.is_none_or(|gpu| gpu.pairs.ranks_per_gpu <= MOST_QUEUES)
    }

    /// Waits for the launches of a stream before it gets another one, if more ranks share a GPU than it has queues: the
    /// launch could otherwise wait at the head of a queue in which a launch of another rank follows,
    /// for which the launches before wait.
    pub(super) fn wait_for_earlier_launches(
        &self,
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<()> {
        match (self.has_queues(), capture) {
            // Each wait for a peer has a deadline in the kernel, so its launch ends.
            (false, None) => stream.wait(LAUNCH_PATIENCE),
            _ => Ok(()),
        }
    }

    /// Launches the messages of a group. Messages that may run at the same time share a launch.
    pub(super) fn messages(
        &mut self,
        calls: &[GpuCall<'_>],
        prepared: &[PreparedCall],
        messages: &[(usize, [u64; SIGNATURE_WORDS])],
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<()> {
        if messages.is_empty() {
            return Ok(());
        }
        let gpu = self.planner.limits().gpu.clone();
        let mut earlier: HashMap<(usize, usize), usize> = HashMap::new();
        // Messages of each launch. Both ends compute the same keys, and launch in the order of the
        // keys.
        let mut launches: BTreeMap<(usize, usize, usize, &str), Vec<usize>> = BTreeMap::new();
        for (position, &(index, _)) in messages.iter().enumerate() {
            let request = &calls[index].request;
            if request.count == 0 {
                continue;
            }
            let pair = (request.root, request.peer);
            let bytes = request.count * request.dtype.size();
            if pair.0 == pair.1 {
                self.queue(stream, capture, |engine| {
                    copy(stream, calls[index].addresses(), bytes)?;
                    engine.keep(stream, capture, None, Vec::new())
                })?;
                continue;
            }
            let number = earlier.entry(pair).or_default();
            let distance = (pair.1 + self.nranks - pair.0) % self.nranks;
            let name = prepared[index].run.function.name();
            // The number of peers of a launch is limited so that all its blocks are resident at
            // once.
            let at_once = gpu.as_ref();
            let at_once = at_once.map_or(1, |gpu| gpu.peers_at_once(self.nranks, bytes));
            let key = (*number, at_once, (distance - 1) / at_once, name);
            launches.entry(key).or_default().push(position);
            *number += 1;
        }
        for positions in launches.values() {
            let mut work_buffer = WorkBuffer::default();
            for &position in positions {
                let (index, signature) = messages[position];
                let captured = capture.is_some();
                let call = &calls[index];
                let run = &prepared[index].run;
                run.add_to(
                    (&mut work_buffer, &run.packed[0]),
                    call,
                    (signature, 0),
                    KeptMemory::default(),
                    captured,
                    self.launch_mode,
                )?;
            }
            let (index, _) = messages[positions[0]];
            self.launch(
                &prepared[index].run,
                &work_buffer,
                Vec::new(),
                stream,
                capture,
            )?;
        }
        Ok(())
    }
}
