//! The sends and receives of a group between two collectives.

use super::pack::WorkBuffer;
use super::{GpuCall, GpuEngine, Prepared, copy};
use crate::error::Result;
use crate::gpu::Stream;
use crate::types::SIGNATURE_WORDS;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

impl GpuEngine {
    /// Launches what may run at once together, each launch the same messages on both ends.
    pub(super) fn messages(
        &mut self,
        calls: &[GpuCall<'_>],
        prepared: &[Arc<Prepared>],
        messages: &[(usize, [u64; SIGNATURE_WORDS])],
        stream: &Stream,
        capture: Option<u64>,
    ) -> Result<()> {
        let gpu = self.planner.limits().gpu;
        let mut earlier: HashMap<(usize, usize), usize> = HashMap::new();
        // What both ends know of a message, in the order in which both launch.
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
                    copy(stream, calls[index].at(), bytes)?;
                    engine.keep(stream, capture, None, None)
                })?;
                continue;
            }
            let turn = earlier.entry(pair).or_default();
            let distance = (pair.1 + self.nranks - pair.0) % self.nranks;
            let name = prepared[index].function.name();
            // Only messages with as many peers at once share a launch, so that its blocks fit.
            let at_once = gpu.map_or(1, |gpu| gpu.peers_at_once(self.nranks, bytes));
            let key = (*turn, at_once, (distance - 1) / at_once, name);
            launches.entry(key).or_default().push(position);
            *turn += 1;
        }
        for positions in launches.values() {
            let mut work_buffer = WorkBuffer::default();
            for &position in positions {
                let (index, signature) = messages[position];
                let captured = capture.is_some();
                let call = &calls[index];
                prepared[index].add_to(
                    &mut work_buffer,
                    call,
                    signature,
                    None,
                    captured,
                    self.begin,
                )?;
            }
            let (index, _) = messages[positions[0]];
            self.launch(&prepared[index], &work_buffer, None, stream, capture)?;
        }
        Ok(())
    }
}
