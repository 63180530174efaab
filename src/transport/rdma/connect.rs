//! From ports to connections: what a rank makes before it knows its peers, what they tell each
//! other over the authenticated exchange, and what follows from it.

use super::connection::{self, Connection, Parts};
use super::endpoint::{Endpoint, Rail};
use super::ports::{AddressKind, Port, Ports};
use super::verbs::{Channel, Domain, Pair, Queue, Registered, Route};
use super::{RdmaRecv, RdmaSend, qp_flow};
use crate::bootstrap::PeerInfo;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{FifoShape, Region};
use crate::sys::ibverbs::{IbvAhAttr, IbvGid, IbvGlobalRoute};
use std::sync::Arc;

/// Hops that a packet may take; as many as routers allow.
const HOPS: u8 = 255;

/// What is connected with whom.
pub(in super::super) struct Plan<'a> {
    pub me: usize,
    pub peers: &'a [PeerInfo],
    /// Ranks that RDMA serves.
    pub served: Vec<usize>,
    pub channels: usize,
    pub shape: FifoShape,
    pub config: &'a Config,
    /// The kind of address that all ranks have.
    pub kind: AddressKind,
}

/// One connection to be.
struct ChannelEnds {
    peer: usize,
    channel: usize,
    rail: usize,
    connection: Connection,
    /// Where its memory begins, and its key.
    memory: (u64, u32),
    first_packet: u32,
}

/// What a rank holds ready for its peers.
pub(in super::super) struct Prepared<'a> {
    plan: Plan<'a>,
    rails: Vec<Rail>,
    channels: Vec<ChannelEnds>,
}

/// An end of each direction to a peer on a channel.
pub(in super::super) struct Ends {
    pub peer: usize,
    pub channel: usize,
    pub send: RdmaSend,
    pub recv: RdmaRecv,
}

/// A port, as peers need to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PortInfo {
    lid: u16,
    mtu: u8,
    gid: [u8; 16],
}

const PORT_INFO_BYTES: usize = 2 + 1 + 16;

/// One connection, as its peer needs to know it; queue pairs' numbers follow.
const CHANNEL_INFO_BYTES: usize = 1 + 4 + 8 + 4;

impl<'a> Prepared<'a> {
    /// Makes queue pairs and registers memory for all connections. Channels take turns among the
    /// ports, and ranks of a host begin with different ones. Both ends of a connection go through
    /// ports with the same place among those of their hosts, where both have as many: ports of
    /// different places may be on networks that do not reach each other.
    ///
    /// # Errors
    /// Unsupported or system, with the numbers that were needed.
    pub fn new(plan: Plan<'a>, ports: &Ports) -> Result<Prepared<'a>> {
        let (config, shape) = (plan.config, plan.shape);
        let ports = &ports.0;
        let rail_of = |peer: usize, channel: usize| {
            (place_of_pair(plan.peers, plan.me, peer) + channel) % ports.len()
        };
        let all = (0..plan.channels)
            .flat_map(|channel| plan.served.iter().map(move |&peer| (peer, channel)));
        let bytes = connection::bytes(&shape);
        let mut rails = Vec::new();
        // Index among the rails in use, by index among the ports.
        let mut places: Vec<Option<usize>> = vec![None; ports.len()];
        let mut pools = Vec::new();
        for (peer, channel) in all.clone() {
            let index = rail_of(peer, channel);
            if places[index].is_some() {
                continue;
            }
            places[index] = Some(rails.len());
            let port = ports[index].clone();
            check_sizes(&port, &shape)?;
            let on_it = all.clone();
            let on_it = on_it.filter(|&(peer, channel)| rail_of(peer, channel) == index);
            let region = Region::heap(on_it.count() * bytes)?;
            let domain = Domain::new(&port.device)?;
            pools.push((Arc::new(Registered::new(&domain, region)?), domain, 0));
            let channel = Channel::new(&port.device)?;
            rails.push(Rail { port, channel });
        }
        let mut channels = Vec::new();
        for (peer, channel) in all {
            let rail = places[rail_of(peer, channel)].unwrap_or_default();
            let Rail {
                port,
                channel: events,
            } = &rails[rail];
            let (memory, domain, at) = &mut pools[rail];
            let entries = qp_flow::completions(&shape, config.ib_qps);
            let queue = Queue::new(events, entries, channels.len())?;
            let (works, room) = qp_flow::queue_sizes(&shape);
            let sizes = (works as u32, room as u32);
            let pairs = (0..config.ib_qps)
                .map(|_| Pair::new(domain, &queue, port.number, sizes))
                .collect::<Result<Vec<Pair>>>()?;
            let mut packet = [0; 4];
            getrandom::fill(&mut packet)
                .map_err(|error| Error::internal(format!("no random numbers: {error}")))?;
            channels.push(ChannelEnds {
                peer,
                channel,
                rail,
                memory: (memory.address() + *at as u64, memory.remote_key()),
                first_packet: u32::from_le_bytes(packet) & 0xff_ffff,
                connection: Connection::new(Parts {
                    who: plan.peers[peer].to_string(),
                    port: port.clone(),
                    shape,
                    memory: memory.clone(),
                    at: *at,
                    queue,
                    pairs,
                    remote: (0, 0),
                    patience: (config.ib_timeout, config.ib_retry),
                })?,
            });
            *at += bytes;
        }
        Ok(Prepared {
            plan,
            rails,
            channels,
        })
    }

    /// What peers need to know.
    pub fn offer(&self) -> Vec<u8> {
        let mut bytes = vec![self.rails.len() as u8];
        for rail in &self.rails {
            let info = info(&rail.port, self.plan.kind);
            bytes.extend(info.lid.to_le_bytes());
            bytes.push(info.mtu);
            bytes.extend(info.gid);
        }
        let mut infos =
            vec![0; self.plan.peers.len() * self.plan.channels * self.channel_info_bytes()];
        for channel in &self.channels {
            let at =
                (channel.peer * self.plan.channels + channel.channel) * self.channel_info_bytes();
            let mut info = vec![channel.rail as u8];
            info.extend(channel.memory.1.to_le_bytes());
            info.extend(channel.memory.0.to_le_bytes());
            info.extend(channel.first_packet.to_le_bytes());
            for pair in channel.connection.pairs() {
                info.extend(pair.number().to_le_bytes());
            }
            infos[at..at + info.len()].copy_from_slice(&info);
        }
        bytes.extend(infos);
        bytes
    }

    fn channel_info_bytes(&self) -> usize {
        CHANNEL_INFO_BYTES + 4 * self.plan.config.ib_qps
    }

    /// Connects all queue pairs with those that the others offer, by rank.
    ///
    /// # Errors
    /// Mismatch if an offer is none; system, naming the peer, if a queue pair cannot be connected.
    pub fn connect(mut self, offers: &[Vec<u8>]) -> Result<(Arc<Endpoint>, Vec<Ends>)> {
        let (plan, size) = (&self.plan, self.channel_info_bytes());
        for channel in &mut self.channels {
            let peer = &plan.peers[channel.peer];
            let theirs = read_offer(&offers[channel.peer], plan, size, channel.channel)
                .ok_or_else(|| {
                    Error::new(
                        ErrorKind::Mismatch,
                        format!(
                            "{peer} offered its queue pairs in another format: use one version"
                        ),
                    )
                })?;
            let (info, remote, packet, numbers) = theirs;
            channel.connection.set_remote(remote.0, remote.1);
            let port = &self.rails[channel.rail].port;
            for (pair, number) in channel.connection.pairs().zip(numbers) {
                let route = Route {
                    port: port.number,
                    mtu: port.attributes.active_mtu.min(u32::from(info.mtu)),
                    address: address(port, &info, plan),
                    number,
                    peer_packet: packet,
                    own_packet: channel.first_packet,
                    timeout: plan.config.ib_timeout,
                    retries: plan.config.ib_retry,
                };
                pair.connect(&route).map_err(|error| error.context(peer))?;
            }
        }
        let channels = self.channels.into_iter();
        let (keys, connections): (Vec<_>, Vec<_>) = channels
            .map(|channel| {
                (
                    (channel.peer, channel.channel),
                    (channel.rail, channel.connection),
                )
            })
            .unzip();
        let endpoint = Endpoint::new(connections, self.rails);
        let ends = keys
            .into_iter()
            .enumerate()
            .map(|(index, (peer, channel))| {
                let end = endpoint.clone();
                Ends {
                    peer,
                    channel,
                    send: RdmaSend {
                        endpoint: end.clone(),
                        index,
                    },
                    recv: RdmaRecv {
                        endpoint: end,
                        index,
                    },
                }
            });
        let ends = ends.collect();
        Ok((endpoint, ends))
    }
}

/// A number that both ends of a pair come to, by which they choose ports: half the sum of their
/// places on their hosts. Ranks of the same place on two hosts have their place, so that those of
/// a host spread over its ports; and so do the pairs of all ranks of two hosts.
fn place_of_pair(peers: &[PeerInfo], one: usize, other: usize) -> usize {
    let place = |rank: usize| {
        let host = peers[rank].host_id;
        peers[..rank]
            .iter()
            .filter(|peer| peer.host_id == host)
            .count()
    };
    (place(one) + place(other)) / 2
}

/// Whether the device has queues that are long enough.
fn check_sizes(port: &Port, shape: &FifoShape) -> Result<()> {
    let (works, room) = qp_flow::queue_sizes(shape);
    let most = port.device.attributes()?.max_qp_wr.max(0) as usize;
    if works.max(room) > most {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} slots need queues of {works} works, and those of {port} have at most {most} \
                 (lower CINCH_SLOTS)",
                shape.depth
            ),
        ));
    }
    Ok(())
}

fn info(port: &Port, kind: AddressKind) -> PortInfo {
    PortInfo {
        lid: port.attributes.lid,
        mtu: port.attributes.active_mtu as u8,
        gid: port.addresses[kind as usize].map_or([0; 16], |(_, gid)| gid.raw),
    }
}

/// How `port` reaches the peer's.
fn address(port: &Port, peer: &PortInfo, plan: &Plan<'_>) -> IbvAhAttr {
    let (index, own) = port.addresses[plan.kind as usize].unwrap_or_default();
    // Ports of one InfiniBand subnet share the first half of their addresses, and need no more
    // than LIDs.
    let other_subnet = own.raw[..8] != peer.gid[..8];
    let global = plan.kind != AddressKind::Lid || other_subnet || peer.lid == 0;
    IbvAhAttr {
        grh: match global {
            true => IbvGlobalRoute {
                dgid: IbvGid { raw: peer.gid },
                flow_label: 0,
                sgid_index: index,
                hop_limit: HOPS,
                traffic_class: plan.config.ib_traffic_class,
            },
            false => IbvGlobalRoute::default(),
        },
        dlid: peer.lid,
        sl: plan.config.ib_service_level,
        is_global: u8::from(global),
        ..IbvAhAttr::default()
    }
}

/// What the offer of a rank says of its connection to this one on a channel: its port, address and
/// key of its memory, its first packet number, its queue pairs.
type Offered = (PortInfo, (u64, u32), u32, Vec<u32>);

fn read_offer(offer: &[u8], plan: &Plan<'_>, size: usize, channel: usize) -> Option<Offered> {
    let (&rails, rest) = offer.split_first()?;
    let (infos, channels) = rest.split_at_checked(usize::from(rails) * PORT_INFO_BYTES)?;
    if channels.len() != plan.peers.len() * plan.channels * size {
        return None;
    }
    let channel = &channels[(plan.me * plan.channels + channel) * size..][..size];
    let word = |at: usize| {
        Some(u32::from_le_bytes(
            channel.get(at..at + 4)?.try_into().ok()?,
        ))
    };
    let info = infos
        .get(usize::from(channel[0]) * PORT_INFO_BYTES..)?
        .get(..PORT_INFO_BYTES)?;
    let memory = u64::from_le_bytes(channel[5..13].try_into().ok()?);
    let numbers = (CHANNEL_INFO_BYTES..size).step_by(4).map(word);
    let info = PortInfo {
        lid: u16::from_le_bytes([info[0], info[1]]),
        mtu: info[2],
        gid: info[3..].try_into().ok()?,
    };
    let known = (1..=5).contains(&info.mtu);
    known.then_some((
        info,
        (memory, word(1)?),
        word(13)?,
        numbers.collect::<Option<_>>()?,
    ))
}
