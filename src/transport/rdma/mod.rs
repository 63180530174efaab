//! Ranks of different hosts over RDMA: reliable connections of InfiniBand and RoCE, through libibverbs.
//!
//! Slots lie in registered memory of both sides, one pool for each port. Devices write them without the
//! peer's cores. `connection` describes the order of the writes; the manual's page on memory ordering
//! explains why that order is enough.
//!
//! Each rank uses the ports nearest to its GPU or its cores; `port_shares` shares them out between the ranks of a host.
//! If such ports do not reach each other, ranks use all ports by number.
//!
//! All ranks use RDMA, or none. If no setting forces RDMA, ranks that cannot use it decline together.

mod connect;
mod connection;
mod endpoint;
mod ends;
#[cfg(feature = "internal")]
pub(super) mod fuzz;
mod port_shares;
mod ports;
mod qp_flow;
mod status;
#[cfg(all(test, not(loom)))]
mod tests;
mod verbs;

use super::ConnectContext;
use super::contract::{Caps, Connected, Ends, Peers, Pollable, Prepared, Setup, Transport};
use super::inbox::InboxMemory;
use crate::bootstrap::PeerInfo;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::ibverbs::{self, Api};
use crate::sys::log::{self, Level};
use crate::sys::pci::SysDirectory;
use crate::sys::socket::Interest;
use crate::topology::{ProcessorFacts, nic_distances};
use crate::types::{Subsystem, TransportKind};
use crate::wire::{Reader, Wire, WireResult, Writer};
use connect::{Plan, QueuePairs};
use endpoint::Endpoint;
use port_shares::{PortFacts, shares};
use ports::{AddressKind, Ports};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// The transport over InfiniBand and RoCE.
pub(super) struct Rdma;

/// Costs are not fitted to hardware yet. Posting a write costs less than a system call, and the device
/// moves the bytes.
static CAPS: Caps = Caps {
    inbox: InboxMemory::None,
    moves_beside: true,
    may_decline: true,
    hop_seconds: 3e-6,
    message_seconds: 1e-6,
    byte_seconds: 0.04e-9,
};

impl Transport for Rdma {
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }

    fn caps(&self) -> &'static Caps {
        &CAPS
    }

    fn obstruction(&self, _: &PeerInfo, _: &PeerInfo, config: &Config) -> Option<&'static str> {
        config
            .encrypts
            .then_some("CINCH_ENCRYPT=1, and RDMA encrypts nothing")
    }

    fn probe(&self, config: &Config) -> Result<&'static str> {
        find_ports(None, config, true).map(|_| "")
    }

    fn prepare(&self, setup: &Setup<'_>) -> Result<Box<dyn Prepared>> {
        let is_forced = setup.config().transport.is_some();
        let found = find_ports(setup.context.verbs.clone(), setup.config(), is_forced);
        match found {
            Err(error) if is_forced => Err(error),
            found => Ok(Box::new(PortSearch {
                is_forced,
                facts: facts(&found, setup.context),
                found,
            })),
        }
    }
}

/// Returns what other ranks need to know of the ports; empty without ports.
fn facts(found: &Result<Ports>, context: &ConnectContext<'_>) -> Vec<PortFacts> {
    let Ok(ports) = found else {
        return Vec::new();
    };
    let processor = ProcessorFacts::read(Path::new("/proc/cpuinfo"));
    let distances = nic_distances(&SysDirectory::new(context.sys), processor, context.place);
    let distances = distances.unwrap_or_else(|error| {
        log_choice(format_args!("RDMA ports are taken by number: {error}"));
        Vec::new()
    });
    ports.facts(&distances)
}

/// Finds the ports that the settings admit. A forced transport overrides `CINCH_IB_DISABLE`.
fn find_ports(verbs: Option<Arc<dyn Api>>, config: &Config, is_forced: bool) -> Result<Ports> {
    if config.ib_disable && !is_forced {
        return Err(Error::invalid_usage("CINCH_IB_DISABLE=1"));
    }
    let api = match verbs {
        Some(api) => api,
        None => Arc::new(ibverbs::Loaded::open(ibverbs::Loaded::LIBRARY)?),
    };
    Ports::find(&api, config)
}

/// The ports of this rank, or the reason for which it has none.
struct PortSearch {
    /// Whether a setting demands RDMA, so that ranks must not decline.
    is_forced: bool,
    found: Result<Ports>,
    facts: Vec<PortFacts>,
}

/// The offer of a rank.
#[derive(Debug, PartialEq)]
struct PortOffer {
    ports: Vec<PortFacts>,
    /// The reason for which there are no ports; empty if there are ports.
    note: String,
}

/// Largest number of characters of [`PortOffer::note`] on the wire.
const LONGEST_NOTE: usize = 250;

impl Wire for PortOffer {
    fn write(&self, writer: &mut Writer) {
        let note: String = self.note.chars().take(LONGEST_NOTE).collect();
        writer.u16(self.ports.len() as u16);
        self.ports.iter().for_each(|port| port.write(writer));
        writer.text(&note);
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<PortOffer> {
        let count = reader.u16()?;
        let ports = (0..count).map(|_| reader.take());
        Ok(PortOffer {
            ports: ports.collect::<WireResult<_>>()?,
            note: reader.text()?,
        })
    }
}

impl PortOffer {
    /// Returns the kinds of addresses of all ports, as a set.
    fn kinds(&self) -> u8 {
        self.ports.iter().fold(0, |set, port| set | port.kinds)
    }

    /// Returns the ports that have an address of `kind`.
    fn with(&self, kind: AddressKind) -> Vec<&PortFacts> {
        let ports = self.ports.iter();
        ports.filter(|port| port.kinds & kind.bit() != 0).collect()
    }
}

/// A failure to connect ranks over certain ports, which all ranks know.
struct Unreachable {
    /// The error of this rank, if it has one.
    own: Option<Error>,
    /// The first error of all ranks.
    why: Error,
}

impl Prepared for PortSearch {
    fn offer(&self) -> Vec<u8> {
        let offer = PortOffer {
            ports: self.facts.clone(),
            note: match &self.found {
                Ok(_) => String::new(),
                Err(error) => error.message().into(),
            },
        };
        offer.to_bytes()
    }

    fn connect(&mut self, setup: &Setup<'_>, peers: &Peers<'_>) -> Result<Option<Connected>> {
        let infos = setup.peers();
        let offers = (0..infos.len()).map(|rank| peers.offer(setup, rank));
        let offers = offers.collect::<Result<Vec<PortOffer>>>()?;
        let kind = match common_kind(&offers, infos) {
            Ok(kind) => kind,
            Err(why) if self.is_forced => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("CINCH_TRANSPORT=rdma cannot connect the ranks: {why}"),
                ));
            }
            Err(why) => {
                log_choice(format_args!(
                    "TCP between hosts, because RDMA has no way: {why}"
                ));
                return Ok(None);
            }
        };
        let ports = self.found.as_ref().map_err(Error::clone)?.with(kind);
        let facts: Vec<Vec<&PortFacts>> = offers.iter().map(|offer| offer.with(kind)).collect();
        let by_number = facts.iter().map(|own| (0..own.len()).collect()).collect();
        let by_distance = shares_of_hosts(&facts, infos);
        let mut choices: Vec<Vec<Vec<usize>>> = vec![by_distance, by_number];
        choices.dedup();
        while !choices.is_empty() {
            let shares = choices.remove(0);
            let share = &shares[setup.me()];
            let plan = Plan {
                me: setup.me(),
                peers: infos,
                served: peers.served,
                channels: setup.config().channels,
                shape: setup.shape,
                config: setup.config(),
                kind,
                share,
            };
            let (endpoint, ends) = match self.open(setup, plan, &ports)? {
                Ok(connected) => connected,
                Err(failed) if choices.is_empty() => return self.decline(failed).map(|()| None),
                Err(Unreachable { why, .. }) => {
                    log_choice(format_args!(
                        "all RDMA ports by number, because the nearest do not connect the ranks: {}",
                        why.message()
                    ));
                    continue;
                }
            };
            let why = match self.is_forced {
                true => "CINCH_TRANSPORT=rdma asks for it",
                false => "every rank has an active port",
            };
            let names = share
                .iter()
                .map(|&port| facts[setup.me()][port].to_string());
            let names = names.collect::<Vec<_>>().join(", ");
            log_choice(format_args!(
                "RDMA between hosts ({kind}, ports {names}), because {why}"
            ));
            return Ok(Some(Connected {
                ends,
                pollable: Some(Box::new(endpoint)),
                // Both hosts have slots for both directions.
                bytes: 2 * setup.fifo_bytes() * peers.served.len(),
            }));
        }
        Ok(None)
    }
}

/// Endpoint and ends of a rank that all its peers have reached.
type Opened = (Arc<Endpoint>, Vec<Ends>);

impl PortSearch {
    /// Opens and tests the connections of `plan`. The inner error is equal on all ranks.
    fn open(
        &self,
        setup: &Setup<'_>,
        plan: Plan<'_>,
        ports: &Ports,
    ) -> Result<std::result::Result<Opened, Unreachable>> {
        let context = setup.context;
        let prepared = QueuePairs::new(plan, ports);
        let offer = prepared.as_ref().map(QueuePairs::offer);
        let offers = context
            .exchange
            .gather_results("use RDMA", &offer.map_err(Error::clone))?;
        let offers: Vec<_> = match offers.into_iter().collect() {
            Ok(offers) => offers,
            Err(why) => {
                let own = prepared.err();
                return Ok(Err(Unreachable { own, why }));
            }
        };
        // An active port may have no route to another port. The system reports this now, or only once a
        // packet has to arrive.
        let mut connected = prepared?.connect(&offers);
        for is_tested in [false, true] {
            if let (true, Ok((endpoint, _))) = (is_tested, &connected) {
                // Half of the time is left for other ports or the next transport.
                let left = context.deadline.saturating_duration_since(Instant::now());
                let tested = endpoint.test_peers(context.fault, Instant::now() + left / 2);
                connected = tested.and(connected);
            }
            let outcome = connected.as_ref().map(|_| ()).map_err(Error::clone);
            let outcomes = context
                .exchange
                .gather_results("reach others by RDMA", &outcome)?;
            if let Some(why) = outcomes.into_iter().find_map(Result::err) {
                let own = connected.err();
                return Ok(Err(Unreachable { own, why }));
            }
        }
        connected.map(Ok)
    }

    /// Leaves the pairs to TCP on all ranks together, unless a setting demands RDMA.
    fn decline(&self, Unreachable { own, why }: Unreachable) -> Result<()> {
        if self.is_forced {
            return Err(own.unwrap_or(why));
        }
        log::line_of(
            Subsystem::Net,
            Level::Warn,
            format_args!("TCP between hosts, because {}", why.message()),
        );
        Ok(())
    }
}

/// Returns the ports that each rank uses by distance, as indices in its list of `ports`.
fn shares_of_hosts(ports: &[Vec<&PortFacts>], peers: &[PeerInfo]) -> Vec<Vec<usize>> {
    let mut all = vec![Vec::new(); ports.len()];
    for first in peers {
        let host = |rank: &usize| peers[*rank].host_id == first.host_id;
        let ranks: Vec<usize> = (0..peers.len()).filter(host).collect();
        if ranks[0] != first.rank {
            continue;
        }
        let of_host: Vec<Vec<&PortFacts>> = ranks.iter().map(|&rank| ports[rank].clone()).collect();
        for (rank, share) in ranks.into_iter().zip(shares(&of_host)) {
            all[rank] = share;
        }
    }
    all
}

/// Returns the kind of address by which RDMA connects all ranks.
///
/// # Errors
/// The rank that has no port, or two ranks that share no kind. All ranks get the same text.
fn common_kind(
    offers: &[PortOffer],
    peers: &[PeerInfo],
) -> std::result::Result<AddressKind, String> {
    let mut each = offers.iter().zip(peers);
    if let Some((offer, peer)) = each.find(|(offer, _)| offer.kinds() == 0) {
        return Err(format!("{peer}: {}", offer.note));
    }
    let common = offers
        .iter()
        .fold(u8::MAX, |set, offer| set & offer.kinds());
    AddressKind::first(common).ok_or_else(|| {
        let first = offers[0].kinds();
        let mut each = offers.iter().zip(peers);
        let other = each.find(|(offer, _)| offer.kinds() != first);
        let other = other.map_or(String::new(), |(offer, peer)| {
            format!(" and {peer} has {}", AddressKind::names(offer.kinds()))
        });
        format!(
            "ports of the ranks share no kind of address: {} has {}{other}",
            peers[0],
            AddressKind::names(first)
        )
    })
}

fn log_choice(text: std::fmt::Arguments<'_>) {
    log::line_of(Subsystem::Net, Level::Info, text);
}

impl Pollable for Arc<Endpoint> {
    fn is_polled(&self) -> bool {
        false
    }

    fn progress(&mut self) {
        Endpoint::progress(self);
    }

    fn arm(&mut self) -> bool {
        Endpoint::arm(self);
        // Completions that arrived before arming announce nothing, so a scan must follow.
        true
    }

    fn interests(&mut self, interests: &mut Vec<Interest>) -> Result<()> {
        Endpoint::interests(self, interests);
        Ok(())
    }

    fn handle(&mut self, _: &[Interest]) {
        self.wake();
    }

    fn check_peers(&mut self) {
        Endpoint::check_peers(self);
    }
}
