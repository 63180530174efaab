//! A listening socket that stays open for the life of a communicator, and serves only during a
//! rendezvous.
//!
//! At other times the control thread drops all connections at once, so that unauthenticated ones
//! cost no memory. A rank that comes early connects again. The socket also shows that its process
//! lives: the kernel refuses connections once the process has ended.

use super::auth::Listener;
use crate::error::{Error, ErrorKind, Result};
use nix::poll::PollFd;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest time that a cancelled rendezvous takes to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause after a connection could not be accepted.
const SHORTAGE_INTERVAL: Duration = Duration::from_millis(20);

/// A socket at which one rank serves reconnects.
#[derive(Debug)]
pub struct ReconnectListener {
    listener: Listener,
    state: Mutex<ListenerState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ListenerState {
    is_serving: bool,
    /// Time until which arrivals wait, because descriptors or memory are short. Polling would spin.
    paused_until: Option<Instant>,
}

impl ReconnectListener {
    /// Listens on a free port of `ip`.
    ///
    /// # Errors
    /// System, with the address.
    pub(super) fn bind(ip: IpAddr) -> Result<(Arc<ReconnectListener>, SocketAddr)> {
        let (listener, address) = Listener::bind(ip)?;
        let listener = ReconnectListener {
            listener,
            state: Mutex::default(),
            changed: Condvar::new(),
        };
        Ok((Arc::new(listener), address))
    }

    /// Returns the descriptors on which connections arrive that [`ReconnectListener::drop_arrivals`]
    /// drops; none during a rendezvous.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = PollFd<'_>> {
        let drops = {
            let state = self.lock();
            let is_paused = state
                .paused_until
                .is_some_and(|until| Instant::now() < until);
            !state.is_serving && !is_paused
        };
        let descriptors = drops.then(|| self.listener.socket_descriptors());
        descriptors.into_iter().flatten()
    }

    /// Closes the connections that have arrived, unless a rendezvous is under way.
    pub(super) fn drop_arrivals(&self) {
        let mut state = self.lock();
        if !state.is_serving {
            let shortage = self.listener.drop_arrivals().err();
            state.paused_until = shortage.map(|_| Instant::now() + SHORTAGE_INTERVAL);
        }
    }

    /// Returns a duplicate of the listener for a rendezvous, which drops the guard when it no longer
    /// accepts. Waits until an earlier rendezvous has stopped.
    ///
    /// # Errors
    /// System if there are no descriptors left; timeout if the earlier rendezvous goes on.
    pub(super) fn start_serving(self: &Arc<Self>) -> Result<(Listener, ServingGuard)> {
        let stopped = self
            .changed
            .wait_timeout_while(self.lock(), STOP_TIMEOUT, |state| state.is_serving);
        let (mut state, _) = stopped.unwrap_or_else(PoisonError::into_inner);
        if state.is_serving {
            return Err(Error::new(
                ErrorKind::Timeout,
                "an earlier rendezvous of this communicator has not stopped",
            ));
        }
        let listener = self.listener.duplicate()?;
        state.is_serving = true;
        Ok((listener, ServingGuard(self.clone())))
    }

    fn lock(&self) -> MutexGuard<'_, ListenerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Marks that a rendezvous accepts connections, until it is dropped.
#[derive(Debug)]
pub(super) struct ServingGuard(Arc<ReconnectListener>);

impl Drop for ServingGuard {
    fn drop(&mut self) {
        self.0.lock().is_serving = false;
        self.0.changed.notify_all();
    }
}
