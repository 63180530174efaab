//! The watchdog: a thread that connects the communicator's fault with its kernels. A raised fault aborts
//! kernels that wait, and a kernel's failure report raises the fault.

use super::connections::Connections;
use crate::bootstrap::{OutOfBandRef, PeerInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::abi::{self, Trouble};
use crate::sync::Fault;
use crate::sys::process::{block_signals, thread_error};
use crate::types::{CallSignature, KernelProtocol};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two checks of the fault and of the kernels' failure report.
const FAULT_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Handle of a communicator's watchdog thread. Drop ends the thread.
#[derive(Debug)]
pub struct Watchdog {
    /// The thread ends when this sender is dropped.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts the thread.
    ///
    /// # Errors
    /// System if the thread cannot be made.
    pub fn start(
        connections: &Arc<dyn Connections>,
        fault: &Arc<Fault>,
        exchange: &OutOfBandRef,
        timeout: Duration,
    ) -> Result<Watchdog> {
        let (stop, stopped) = mpsc::channel();
        let watch = Watch {
            connections: connections.clone(),
            fault: fault.clone(),
            exchange: exchange.clone(),
            timeout,
        };
        let thread = std::thread::Builder::new()
            .name("cinch-watchdog".into())
            .spawn(move || {
                block_signals();
                while stopped.recv_timeout(FAULT_POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    watch.check();
                }
            })
            .map_err(|error| thread_error("starting a watchdog thread", error))?;
        Ok(Watchdog {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread sleeps for one interval at most.
            let _ = thread.join();
        }
    }
}

/// State of the watchdog thread.
struct Watch {
    connections: Arc<dyn Connections>,
    fault: Arc<Fault>,
    exchange: OutOfBandRef,
    timeout: Duration,
}

impl Watch {
    fn check(&self) {
        // A pending failure of a peer does not end waits yet. Until it does, a kernel's failure report still
        // raises the fault.
        let over = self.fault.ends_waits().is_err();
        if !over && let Some(error) = self.trouble() {
            self.fault.raise(error);
            if let Some(reason) = self.fault.reason() {
                self.exchange.announce(reason);
            }
        }
        if self.fault.ends_waits().is_err() {
            self.connections.abort();
        }
    }

    /// Returns the error of a kernel's failure report.
    fn trouble(&self) -> Option<Error> {
        Some(describe(
            &self.connections.trouble()?,
            self.exchange.peers(),
            self.exchange.rank(),
            self.timeout,
        ))
    }
}

/// Returns the error of a failure report. Peers influence the numbers in the report, so they are checked
/// before they index anything.
fn describe(trouble: &Trouble, peers: &[PeerInfo], rank: usize, timeout: Duration) -> Error {
    let name = |rank: usize| {
        let peer = peers.get(rank);
        peer.map_or(format!("rank {rank}"), |peer| peer.to_string())
    };
    let (me, peer) = (name(rank), name(trouble.peer as usize));
    let mine = CallSignature::describe(&trouble.mine);
    let place = format!(
        "step {} of pass {} on channel {}",
        trouble.step, trouble.pass, trouble.channel
    );
    if trouble.kind == abi::TROUBLE_MISMATCH {
        return Error::new(
            ErrorKind::Mismatch,
            format!(
                "ranks disagree: {peer} runs {}, {me} runs {mine} ({place})",
                CallSignature::describe(&trouble.theirs)
            ),
        );
    }
    let waited = format!(
        "{me} has waited {:.1} s (CINCH_TIMEOUT) for {peer}",
        timeout.as_secs_f64()
    );
    let protocol = KernelProtocol::ALL.get(trouble.protocol as usize);
    let protocol_name = protocol.map_or("unknown protocol".into(), KernelProtocol::to_string);
    let sentence = match protocol {
        // A fused kernel only checks flags in the data, so its report has no channel, step or
        // counter.
        Some(protocol) if protocol.is_fused() => format!(
            "{waited} to send its part of {mine} ({protocol_name}, call {} of that kind): it has not \
             made that call, or has made another one",
            trouble.expected
        ),
        _ => {
            let verb = if trouble.sends != 0 { "take" } else { "send" };
            format!(
                "{waited} to {verb} message {} of {place} ({protocol_name}), in {mine}; it was at {}",
                trouble.expected, trouble.seen
            )
        }
    };
    Error::new(ErrorKind::Timeout, sentence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeout_of_a_fused_kernel_names_the_peer_and_no_channel() {
        let said = |protocol: KernelProtocol| {
            let trouble = Trouble {
                kind: abi::TROUBLE_TIMEOUT,
                peer: 3,
                protocol: protocol.number(),
                expected: 5,
                seen: 4,
                ..Trouble::default()
            };
            let error = describe(&trouble, &[], 1, Duration::from_secs(2));
            assert_eq!(error.kind(), ErrorKind::Timeout);
            error.message().to_string()
        };
        for protocol in KernelProtocol::ALL {
            let sentence = said(protocol);
            let name = protocol.to_string();
            for word in ["rank 1 has waited 2.0 s", "rank 3", &name, "5"] {
                assert!(sentence.contains(word), "{sentence}");
            }
            assert_eq!(sentence.contains("channel 0"), !protocol.is_fused());
            assert_eq!(sentence.contains("it was at 4"), !protocol.is_fused());
        }
    }
}
