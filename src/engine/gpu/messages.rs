//! The sends and receives of a group between two collectives.

use super::pack::Blob;
use super::{GpuCall, GpuEngine, Prepared, copy};
use crate::error::Result;
use crate::gpu::{Event, Stream};
use crate::types::SIGNATURE_WORDS;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

impl GpuEngine {
    /// Launches what may run at once together, each launch the same messages on both ends. They run
    /// on the first one's stream, behind what is on the streams of all, which go on behind them: also
    /// on the stream of a receive whose send from the same rank has taken its place, and is empty.
    pub(super) fn messages(
        &mut self,
        calls: &[GpuCall<'_>],
        prepared: &[Arc<Prepared>],
        messages: &[(usize, [u64; SIGNATURE_WORDS])],
        capture: Option<u64>,
    ) -> Result<()> {
        let size = |index: usize| calls[index].request.count;
        if messages.iter().all(|&(index, _)| size(index) == 0) {
            return Ok(());
        }
        let (first, _) = messages[0];
        let stream = self.stream(calls[first].buffers.stream());
        let others = self.other_streams(calls, messages);
        for other in &others {
            // An event of its own: the driver keeps what is waited for.
            let reached = Event::new(&self.context)?;
            reached.record(other)?;
            stream.wait_event(&reached)?;
        }
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
                self.queue(&stream, capture, |_| {
                    copy(&stream, calls[index].at(), bytes)
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
            let mut blob = Blob::default();
            for &position in positions {
                let (index, signature) = messages[position];
                let captured = capture.is_some();
                prepared[index].add_to(&mut blob, &calls[index], signature, None, captured)?;
            }
            let (index, _) = messages[positions[0]];
            self.launch(&prepared[index], &blob, None, &stream, capture)?;
        }
        for other in &others {
            self.order.enter(other, capture)?;
        }
        Ok(())
    }

    /// The streams of messages beside the first one's, on which all of them run.
    fn other_streams(
        &self,
        calls: &[GpuCall<'_>],
        messages: &[(usize, [u64; SIGNATURE_WORDS])],
    ) -> Vec<Stream> {
        let handles = messages
            .iter()
            .map(|&(index, _)| calls[index].buffers.stream());
        let mut seen: Vec<usize> = Vec::new();
        for handle in handles {
            if !seen.contains(&handle) {
                seen.push(handle);
            }
        }
        seen.drain(..1);
        seen.into_iter().map(|handle| self.stream(handle)).collect()
    }
}
