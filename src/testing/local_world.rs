//! Communicators whose ranks are threads of one process.

use crate::bootstrap::LocalOutOfBand;
use crate::comm::Communicator;
use crate::config::Config;
use crate::error::Result;
use crate::sync::Fault;
use std::sync::Arc;

/// Runs `body` on each rank of a communicator of `nranks` threads, and returns the results in rank
/// order. The control plane lies in this process's memory; `config` names the transport, by default
/// loopback.
///
/// # Panics
/// If a rank cannot connect, or panics.
pub fn local_world<T: Send>(
    nranks: usize,
    config: &Config,
    body: impl Fn(&Communicator) -> T + Sync,
) -> Vec<T> {
    let worlds = try_local_world(nranks, config, |comm| {
        body(&comm.unwrap_or_else(|error| panic!("connecting: {error}")))
    });
    worlds.into_iter().collect()
}

/// Runs ranks as [`local_world`] does, but passes a failure to connect to `body` instead of
/// panicking.
///
/// # Panics
/// If a rank panics.
pub fn try_local_world<T: Send>(
    nranks: usize,
    config: &Config,
    body: impl Fn(Result<Communicator>) -> T + Sync,
) -> Vec<T> {
    let faults: Vec<Arc<Fault>> = (0..nranks).map(|_| Fault::new()).collect();
    let exchanges = LocalOutOfBand::world_with(nranks, &faults, config);
    std::thread::scope(|scope| {
        let threads: Vec<_> = exchanges
            .into_iter()
            .zip(faults)
            .map(|(exchange, fault)| {
                let body = &body;
                scope.spawn(move || body(Communicator::over(exchange, fault, config.clone())))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|cause| std::panic::resume_unwind(cause))
            })
            .collect()
    })
}
