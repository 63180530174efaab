//! All RDMA connections of a rank, which its ends and its waiter share.

use super::connection::Connection;
use super::ports::Port;
use super::status;
use super::verbs::{Channel, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::ibverbs::{IBV_EVENT_DEVICE_FATAL, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR};
use crate::sys::log::{self, Level};
use crate::sys::socket::Interest;
use crate::types::Subsystem;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest wait of a closing rank for writes in flight.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(200);

/// Interval between two polls for completions.
const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// A port in use, and the channel on which its queues announce completions.
#[derive(Debug)]
pub(super) struct Rail {
    pub port: Port,
    pub channel: Arc<Channel>,
}

/// The connections of a rank and their ports. The lock of a connection is contended only if a program polls
/// ends from several threads.
#[derive(Debug)]
pub(super) struct Endpoint {
    connections: Vec<Mutex<Connection>>,
    /// For each connection, the index of its port in `rails`.
    rails_of: Vec<usize>,
    rails: Vec<Rail>,
}

impl Endpoint {
    pub(super) fn new(connections: Vec<(usize, Connection)>, rails: Vec<Rail>) -> Arc<Endpoint> {
        let (rails_of, connections): (Vec<_>, Vec<_>) = connections.into_iter().unzip();
        Arc::new(Endpoint {
            connections: connections.into_iter().map(Mutex::new).collect(),
            rails_of,
            rails,
        })
    }

    pub(super) fn connection(&self, index: usize) -> MutexGuard<'_, Connection> {
        let connection = &self.connections[index];
        connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn each(&self) -> impl Iterator<Item = MutexGuard<'_, Connection>> {
        (0..self.connections.len()).map(|index| self.connection(index))
    }

    /// Sends credits that ends could not post.
    pub fn progress(&self) {
        self.each().for_each(|mut connection| connection.catch_up());
    }

    /// Makes every queue announce its next completion. Earlier completions announce nothing, so a scan must
    /// follow before the rank sleeps.
    pub fn arm(&self) {
        self.each().for_each(|mut connection| connection.arm());
    }

    /// Appends the descriptors on which devices announce completions and events.
    pub fn interests(&self, interests: &mut Vec<Interest>) {
        let readable = |fd: RawFd| Interest {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        for rail in &self.rails {
            interests.push(readable(rail.channel.fd()));
            interests.push(readable(rail.port.device.event_fd()));
        }
    }

    /// Takes the announced completions and events.
    pub fn wake(&self) {
        for rail in &self.rails {
            rail.channel.events(|number| {
                if number < self.connections.len() {
                    self.connection(number).disarmed();
                }
            });
            // Rails may share a device; the first of them takes the events for all.
            while let Some((event, element)) = rail.port.device.event() {
                self.log_event(&rail.port.device, event, element);
            }
        }
    }

    /// Logs an event of a device. Events that break queue pairs also show in completions.
    fn log_event(&self, device: &Arc<Device>, event: u32, element: usize) {
        let name = status::event_name(event);
        let rails = self.rails.iter().enumerate();
        let rails = rails.filter(|(_, rail)| Arc::ptr_eq(&rail.port.device, device));
        let of_ports = matches!(event, IBV_EVENT_PORT_ERR | IBV_EVENT_PORT_ACTIVE);
        let mut concerns_us = false;
        for (index, Rail { port, .. }) in rails {
            let fatal = event == IBV_EVENT_DEVICE_FATAL;
            let of_this_port = of_ports && element == usize::from(port.number);
            if !fatal && !of_this_port {
                continue;
            }
            concerns_us = true;
            log::line_of(Subsystem::Net, Level::Warn, format_args!("{port}: {name}"));
            if fatal {
                self.break_rail(index);
            }
        }
        if !concerns_us {
            let device = device.name();
            log::line_of(
                Subsystem::Net,
                Level::Info,
                format_args!("{device}: {name}"),
            );
        }
    }

    /// Breaks the connections of a rail whose device has failed.
    fn break_rail(&self, rail: usize) {
        let port = &self.rails[rail].port;
        let name = status::event_name(IBV_EVENT_DEVICE_FATAL);
        let rails_of = self.rails_of.iter().enumerate();
        for (index, _) in rails_of.filter(|(_, of)| **of == rail) {
            self.connection(index).break_off(Error::new(
                ErrorKind::System,
                format!("{port}: {name}; look at the kernel's log of this host"),
            ));
        }
    }

    /// Sends a packet to every peer and waits for all answers. Queue pairs connect without a packet, so ports
    /// on separate networks would otherwise fail with the first message.
    ///
    /// All ranks must have connected their queue pairs. A peer that has not loses the packet, and gets it
    /// again a second later.
    ///
    /// # Errors
    /// Remote or system, naming the peer that did not answer; timeout at `deadline`; the fault's reason.
    pub fn test_peers(&self, fault: &Fault, deadline: Instant) -> Result<()> {
        self.each()
            .for_each(|mut connection| connection.probe_all());
        loop {
            let mut silent = None;
            for mut connection in self.each() {
                if !connection.has_answered()? {
                    silent = silent.or_else(|| Some(connection.route()));
                }
            }
            let Some(silent) = silent else {
                return Ok(());
            };
            fault.ends_waits()?;
            if Instant::now() >= deadline {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!("no answer by RDMA from {silent} in half the time for joining"),
                ));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Checks which peers still answer.
    pub fn check_peers(&self) {
        self.each()
            .for_each(|mut connection| connection.check_peer());
    }
}

impl Drop for Endpoint {
    /// Sends a close after all messages, so that peers see an orderly end instead of a failure.
    fn drop(&mut self) {
        self.each().for_each(|mut connection| connection.close());
        let until = Instant::now() + CLOSE_TIMEOUT;
        while !self.each().all(|mut connection| connection.is_closed()) && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}
