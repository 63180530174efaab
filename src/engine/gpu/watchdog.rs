//! Carries news between kernels and the rest: the communicator's fault to kernels that wait, and
//! what kernels found wrong to the fault.

use super::connections::Connections;
use crate::bootstrap::{OutOfBandRef, PeerInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::mem::abi::{self, Trouble};
use crate::sync::Fault;
use crate::sys::process::block_signals;
use crate::types::{CallSignature, KernelProtocol};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

/// Time between two looks.
const BEAT: Duration = Duration::from_millis(2);

/// The thread of one communicator that looks; it ends with this value.
#[derive(Debug)]
pub struct Watchdog {
    /// Dropped to end the thread.
    alive: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts to look.
    ///
    /// # Errors
    /// System if there can be no thread.
    pub fn start(
        wiring: &Arc<dyn Connections>,
        fault: &Arc<Fault>,
        exchange: &OutOfBandRef,
        timeout: Duration,
    ) -> Result<Watchdog> {
        let (alive, ends) = mpsc::channel();
        let watch = Watch {
            wiring: wiring.clone(),
            fault: fault.clone(),
            exchange: exchange.clone(),
            timeout,
        };
        let thread = std::thread::Builder::new()
            .name("cinch-watchdog".into())
            .spawn(move || {
                block_signals();
                while ends.recv_timeout(BEAT) == Err(RecvTimeoutError::Timeout) {
                    watch.look();
                }
            })
            .map_err(|error| Error::system("starting a watchdog thread", error))?;
        Ok(Watchdog {
            alive: Some(alive),
            thread: Some(thread),
        })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.alive.take());
        if let Some(thread) = self.thread.take() {
            // It only ever sleeps for a beat.
            let _ = thread.join();
        }
    }
}

struct Watch {
    wiring: Arc<dyn Connections>,
    fault: Arc<Fault>,
    exchange: OutOfBandRef,
    timeout: Duration,
}

impl Watch {
    fn look(&self) {
        // What a kernel finds wrong is this rank's own, also while others' end is waited out.
        let over = self.fault.ends_waits().is_err();
        if !over && let Some(error) = self.trouble() {
            self.fault.raise(error);
            if let Some(reason) = self.fault.reason() {
                self.exchange.announce(reason);
            }
        }
        if self.fault.ends_waits().is_err() {
            self.wiring.abort();
        }
    }

    /// What a kernel has reported.
    fn trouble(&self) -> Option<Error> {
        Some(describe(
            &self.wiring.trouble()?,
            self.exchange.peers(),
            self.exchange.rank(),
            self.timeout,
        ))
    }
}

/// The sentence of a report. Its numbers come from a kernel that saw what peers wrote: nothing is
/// indexed with them unchecked.
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
        // Flags among the data are all that it knows: no channel, step or counter.
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

    /// What a kernel has not seen is not said.
    #[test]
    fn a_fused_kernel_that_gives_up_knows_whom_it_waited_for() {
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
