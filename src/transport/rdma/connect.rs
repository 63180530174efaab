//! Queue pairs of a rank: it creates them before it knows its peers, offers their numbers over the
//! authenticated exchange, and connects them with those of its peers.

use super::connection::{self, Connection, Parts};
use super::endpoint::{Endpoint, Rail};
use super::ends::{RdmaRecv, RdmaSend};
use super::ports::{AddressKind, Port, Ports};
use super::qp_flow;
use super::verbs::{Channel, Domain, Pair, Queue, Registered, Route};
use crate::bootstrap::PeerInfo;
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::{FifoShape, Region};
use crate::sys::ibverbs::{IbvAhAttr, IbvGid, IbvGlobalRoute};
use crate::transport::contract::{Ends, place_of_pair};
use crate::wire::{Reader, Wire, WireResult, Writer};
use std::sync::Arc;

/// Hop limit of packets: the largest that routers allow.
const HOPS: u8 = 255;

/// The connections to create.
pub(super) struct Plan<'a> {
    pub me: usize,
    pub peers: &'a [PeerInfo],
    /// Ranks to connect with.
    pub served: &'a [usize],
    pub channels: usize,
    pub shape: FifoShape,
    pub config: &'a Config,
    /// The kind of address that all ranks have.
    pub kind: AddressKind,
    /// Indices of the ports that this rank uses, in the order in which channels take them.
    pub share: &'a [usize],
}

impl Plan<'_> {
    /// Returns peer and channel of each connection.
    fn connections(&self) -> impl Iterator<Item = (usize, usize)> + Clone + '_ {
        let channels = 0..self.channels;
        channels.flat_map(|channel| self.served.iter().map(move |&peer| (peer, channel)))
    }

    /// Returns the index of the port that a connection uses.
    fn port_of(&self, (peer, channel): (usize, usize)) -> usize {
        let turn = place_of_pair(self.peers, self.me, peer) + channel;
        self.share[turn % self.share.len()]
    }
}

/// A connection of this rank whose peer is not known yet.
struct ChannelEnds {
    peer: usize,
    channel: usize,
    rail: usize,
    connection: Connection,
    /// Address and key of the memory that the peer writes.
    memory: (u64, u32),
    first_packet: u32,
}

/// Registered memory of a port, which its connections share.
struct Pool {
    memory: Arc<Registered>,
    domain: Arc<Domain>,
    /// Offset in the memory of the part for the next connection.
    at: usize,
}

/// The queue pairs of a rank, not connected yet.
pub(super) struct QueuePairs<'a> {
    plan: Plan<'a>,
    rails: Vec<Rail>,
    channels: Vec<ChannelEnds>,
}

impl<'a> QueuePairs<'a> {
    /// Creates queue pairs and registers memory for all connections.
    ///
    /// Channels take turns among the ports of this rank's share, and ranks of a host begin with different ports. If
    /// shares are all ports, both ends of a connection use ports with the same index on their hosts, if both hosts
    /// have as many: ports with different indices may be on networks that do not reach each other.
    ///
    /// # Errors
    /// Unsupported or system, with the numbers that were needed.
    pub fn new(plan: Plan<'a>, ports: &Ports) -> Result<QueuePairs<'a>> {
        let (mut rails, mut pools) = (Vec::new(), Vec::new());
        // For each port, its index among the rails, which are the ports in use; `None` if the port
        // is not in use.
        let mut places: Vec<Option<usize>> = vec![None; ports.0.len()];
        for connection in plan.connections() {
            let index = plan.port_of(connection);
            if places[index].is_some() {
                continue;
            }
            places[index] = Some(rails.len());
            let port = ports.0[index].clone();
            check_sizes(&port, &plan.shape)?;
            let of_port = plan.connections();
            let of_port = of_port.filter(|&other| plan.port_of(other) == index);
            let region = Region::heap(of_port.count() * connection::bytes(&plan.shape))?;
            let domain = Domain::new(&port.device)?;
            pools.push(Pool {
                memory: Arc::new(Registered::new(&domain, region)?),
                domain,
                at: 0,
            });
            let channel = Channel::new(&port.device)?;
            rails.push(Rail { port, channel });
        }
        let mut channels = Vec::new();
        for (number, connection) in plan.connections().enumerate() {
            let rail = places[plan.port_of(connection)].unwrap_or_default();
            let at = (number, rail);
            channels.push(plan.create(connection, at, &rails[rail], &mut pools[rail])?);
        }
        Ok(QueuePairs {
            plan,
            rails,
            channels,
        })
    }

    /// Returns the facts that peers need.
    pub fn offer(&self) -> QueuePairOffer {
        let rails = self.rails.iter();
        let channels = self.channels.iter().map(|ends| ChannelOffer {
            peer: ends.peer as u32,
            channel: ends.channel as u32,
            rail: ends.rail as u8,
            memory: ends.memory,
            first_packet: ends.first_packet,
            pairs: ends.connection.pairs().map(Pair::number).collect(),
        });
        QueuePairOffer {
            ports: rails.map(|rail| info(&rail.port, self.plan.kind)).collect(),
            channels: channels.collect(),
        }
    }

    /// Connects all queue pairs with the peers' queue pairs. `offers` has the offer of each rank.
    ///
    /// # Errors
    /// Mismatch if an offer lacks a connection; system, naming the peer, if a queue pair cannot be connected.
    pub fn connect(mut self, offers: &[QueuePairOffer]) -> Result<(Arc<Endpoint>, Vec<Ends>)> {
        let plan = &self.plan;
        for channel in &mut self.channels {
            let peer = &plan.peers[channel.peer];
            let theirs = offers[channel.peer].find(plan.me, channel.channel, plan.config.ib_qps);
            let (info, theirs) = theirs.ok_or_else(|| {
                Error::new(
                    ErrorKind::Mismatch,
                    format!("{peer} offered its queue pairs in another format: use one version"),
                )
            })?;
            channel
                .connection
                .set_remote(theirs.memory.0, theirs.memory.1);
            let port = &self.rails[channel.rail].port;
            for (pair, &number) in channel.connection.pairs().zip(&theirs.pairs) {
                let route = Route {
                    port: port.number,
                    mtu: port.attributes.active_mtu.min(u32::from(info.mtu)),
                    address: address(port, info, plan),
                    number,
                    peer_packet: theirs.first_packet,
                    own_packet: channel.first_packet,
                    timeout: plan.config.ib_timeout,
                    retries: plan.config.ib_retry,
                };
                pair.connect(&route).map_err(|error| error.context(peer))?;
            }
        }
        let channels = self.channels.into_iter();
        let (keys, connections): (Vec<_>, Vec<_>) = channels
            .map(|ends| ((ends.peer, ends.channel), (ends.rail, ends.connection)))
            .unzip();
        let endpoint = Endpoint::new(connections, self.rails);
        let keys = keys.into_iter().enumerate();
        let ends = keys.map(|(index, (peer, channel))| Ends {
            peer,
            channel,
            send: Box::new(RdmaSend {
                endpoint: endpoint.clone(),
                index,
            }),
            recv: Box::new(RdmaRecv {
                endpoint: endpoint.clone(),
                index,
            }),
        });
        let ends = ends.collect();
        Ok((endpoint, ends))
    }
}

impl Plan<'_> {
    /// Creates the queue pairs of connection `number`, in the next part of the pool.
    fn create(
        &self,
        (peer, channel): (usize, usize),
        (number, rail): (usize, usize),
        Rail {
            port,
            channel: events,
        }: &Rail,
        pool: &mut Pool,
    ) -> Result<ChannelEnds> {
        let (config, shape) = (self.config, self.shape);
        let entries = qp_flow::completions(&shape, config.ib_qps);
        let queue = Queue::new(events, entries, number)?;
        let (works, room) = qp_flow::queue_sizes(&shape);
        let sizes = (works as u32, room as u32);
        let pairs = (0..config.ib_qps)
            .map(|_| Pair::new(&pool.domain, &queue, port.number, sizes))
            .collect::<Result<Vec<Pair>>>()?;
        let mut packet = [0; 4];
        getrandom::fill(&mut packet)
            .map_err(|error| Error::internal(format!("no random numbers: {error}")))?;
        let at = pool.at;
        pool.at += connection::bytes(&shape);
        Ok(ChannelEnds {
            peer,
            channel,
            rail,
            memory: (pool.memory.address() + at as u64, pool.memory.remote_key()),
            first_packet: u32::from_le_bytes(packet) & 0xff_ffff,
            connection: Connection::new(Parts {
                who: self.peers[peer].to_string(),
                port: port.clone(),
                shape,
                memory: pool.memory.clone(),
                at,
                queue,
                pairs,
                remote: (0, 0),
                patience: (config.ib_timeout, config.ib_retry),
            })?,
        })
    }
}

/// A port, as peers need to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PortInfo {
    lid: u16,
    mtu: u8,
    gid: [u8; 16],
}

impl Wire for PortInfo {
    fn write(&self, writer: &mut Writer) {
        writer.u16(self.lid).u8(self.mtu).put(&self.gid);
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<PortInfo> {
        Ok(PortInfo {
            lid: reader.u16()?,
            mtu: reader.u8()?,
            gid: reader.take()?,
        })
    }
}

/// A connection, as its peer needs to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChannelOffer {
    peer: u32,
    channel: u32,
    /// Index of the port.
    rail: u8,
    /// Address and key of the memory to write.
    memory: (u64, u32),
    first_packet: u32,
    /// Numbers of the queue pairs.
    pairs: Vec<u32>,
}

impl Wire for ChannelOffer {
    fn write(&self, writer: &mut Writer) {
        writer.u32(self.peer).u32(self.channel).u8(self.rail);
        writer.u64(self.memory.0).u32(self.memory.1);
        writer.u32(self.first_packet).u16(self.pairs.len() as u16);
        self.pairs.iter().for_each(|pair| pair.write(writer));
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<ChannelOffer> {
        Ok(ChannelOffer {
            peer: reader.u32()?,
            channel: reader.u32()?,
            rail: reader.u8()?,
            memory: (reader.u64()?, reader.u32()?),
            first_packet: reader.u32()?,
            pairs: {
                let count = reader.u16()?;
                let pairs = (0..count).map(|_| reader.u32());
                pairs.collect::<WireResult<_>>()?
            },
        })
    }
}

/// The queue pairs of a rank, as its peers need to know them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct QueuePairOffer {
    ports: Vec<PortInfo>,
    channels: Vec<ChannelOffer>,
}

impl QueuePairOffer {
    /// Returns port and connection to rank `me` on `channel`, with `count` queue pairs; `None` if the offer
    /// has no such connection.
    pub(super) fn find(
        &self,
        me: usize,
        channel: usize,
        count: usize,
    ) -> Option<(&PortInfo, &ChannelOffer)> {
        let mut channels = self.channels.iter();
        let found =
            channels.find(|ends| (ends.peer as usize, ends.channel as usize) == (me, channel))?;
        let info = self.ports.get(usize::from(found.rail))?;
        let is_valid = (1..=5).contains(&info.mtu) && found.pairs.len() == count;
        is_valid.then_some((info, found))
    }
}

impl Wire for QueuePairOffer {
    fn write(&self, writer: &mut Writer) {
        writer.u8(self.ports.len() as u8);
        self.ports.iter().for_each(|port| port.write(writer));
        writer.u32(self.channels.len() as u32);
        self.channels.iter().for_each(|ends| ends.write(writer));
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<QueuePairOffer> {
        let ports = reader.u8()?;
        let ports = (0..ports).map(|_| reader.take());
        let ports = ports.collect::<WireResult<_>>()?;
        let channels = reader.u32()?;
        let channels = (0..channels).map(|_| reader.take());
        Ok(QueuePairOffer {
            ports,
            channels: channels.collect::<WireResult<_>>()?,
        })
    }
}

/// Checks that the device has queues of sufficient length.
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

/// Returns the facts about a port that peers need.
fn info(port: &Port, kind: AddressKind) -> PortInfo {
    PortInfo {
        lid: port.attributes.lid,
        mtu: port.attributes.active_mtu as u8,
        gid: port.addresses[kind as usize].map_or([0; 16], |(_, gid)| gid.raw),
    }
}

/// Returns the address of the peer's port, as `port` reaches it.
fn address(port: &Port, peer: &PortInfo, plan: &Plan<'_>) -> IbvAhAttr {
    let (index, own) = port.addresses[plan.kind as usize].unwrap_or_default();
    // Ports of one InfiniBand subnet share the first half of their GIDs, and reach each other by LID.
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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn queue_pair_offer_survives_bytes_and_damage_is_detected() {
        let offer = QueuePairOffer {
            ports: vec![PortInfo {
                lid: 7,
                mtu: 3,
                gid: [9; 16],
            }],
            channels: vec![ChannelOffer {
                peer: 1,
                channel: 2,
                rail: 0,
                memory: (1 << 40, 5),
                first_packet: 77,
                pairs: vec![4, 6],
            }],
        };
        let bytes = offer.to_bytes();
        assert_eq!(QueuePairOffer::from_bytes(&bytes).unwrap(), offer);
        for cut in 0..bytes.len() {
            assert!(QueuePairOffer::from_bytes(&bytes[..cut]).is_err());
        }
        assert!(offer.find(1, 2, 2).is_some());
        for (me, channel, count) in [(0, 2, 2), (1, 1, 2), (1, 2, 3)] {
            assert!(offer.find(me, channel, count).is_none());
        }
        let mut foreign = offer.clone();
        foreign.channels[0].rail = 1;
        assert!(foreign.find(1, 2, 2).is_none(), "no such port");
        foreign = offer;
        foreign.ports[0].mtu = 6;
        assert!(foreign.find(1, 2, 2).is_none(), "no such MTU");
    }
}
