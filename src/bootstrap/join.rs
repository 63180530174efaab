//! A rank as a guest of the meeting: it comes with what it is, and leaves with what all are.

use super::auth::{HandshakeConfig, Listener, OnRefusal, Peer, PeerIdentity, Role, connect_to_any};
use super::framed_stream::{Body, FramedStream};
use super::rank_entry::RankEntry;
use super::rendezvous_server::{REFUSED, REGISTER, TABLE, margin, serve};
use super::wire::{Reader, Writer, damaged, read_error, write_error};
use super::{UniqueId, address, process};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::socket;
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// What a rank takes home.
pub(super) struct PeerTable {
    pub(super) members: Vec<RankEntry>,
    /// Random bytes of this meeting: keys differ between communicators of one secret.
    pub(super) salt: [u8; 32],
    /// Rank 0's, where the others come next.
    pub(super) listener: Option<Listener>,
}

/// Goes to the meeting as `rank` of `nranks` and returns when all have come.
pub(super) fn meet(
    id: &UniqueId,
    rank: usize,
    nranks: usize,
    config: &Config,
    deadline: Instant,
    fault: &Fault,
) -> Result<PeerTable> {
    let mut addresses = id.addresses();
    if rank == 0 {
        process::check_descriptors(nranks + 8, &format!("rank 0 of {nranks} ranks"))?;
        if id.rank_zero_opens() {
            let (listener, bound) = Listener::bind_to_own(&addresses).map_err(|error| {
                error.context("rank 0 opens the meeting, but another job may have the port")
            })?;
            addresses = bound;
            serve(id, listener, config.init_timeout)?;
        }
    }
    let terms = HandshakeConfig::new(
        &id.key(b"", "meeting"),
        PeerIdentity {
            role: Role::Rendezvous,
            rank,
            word: 0,
        },
    );
    let peer = reach(id, &addresses, &terms, config, deadline, fault)?;
    // Once registered, a rank that goes counts as one that died: who cannot come does not register.
    fault.check()?;
    // The meeting, too, counts from here on.
    let patience = deadline.saturating_duration_since(Instant::now());
    let at = peer.address;
    let mut channel = FramedStream::new(peer);

    // Nobody waits until the deadline for one that can come no further.
    let introduced = introduce((&channel, id), rank, nranks, config);
    let (member, listener) = introduced.inspect_err(|error| {
        let who = format!("rank {rank} (host {})", process::host_name());
        let told = error.clone().context(who);
        channel.queue(REFUSED, &Body::new(write_error(&told)));
        channel.flush();
    })?;
    let mut writer = Writer::default();
    writer.u32(nranks.min(u32::MAX as usize) as u32);
    writer.u64(patience.as_millis() as u64);
    member.write(&mut writer);
    channel.queue(REGISTER, &Body::new(writer.0));

    let place = format!("the meeting at {at}");
    // The meeting decides before our time is up. Where that has not come by then, it is late itself,
    // and alone knows who is missing.
    let answer = channel
        .exchange(deadline + margin(patience), fault)
        .map_err(|error| error.context(&place))?;
    match answer.kind {
        REFUSED => Err(read_error(&answer.body)?),
        TABLE => {
            let (members, salt) =
                read_table(&answer.body, &member, nranks).map_err(|error| error.context(&place))?;
            Ok(PeerTable {
                members,
                salt,
                listener,
            })
        }
        _ => Err(damaged().context(&place)),
    }
}

/// This process as a rank, once it has reached the meeting. Rank 0 listens.
fn introduce(
    (meeting, id): (&FramedStream, &UniqueId),
    rank: usize,
    nranks: usize,
    config: &Config,
) -> Result<(RankEntry, Option<Listener>)> {
    // The address by which we reach the meeting is one by which its other guests reach us.
    let ip = match &config.interface {
        Some(_) => address::choose(config)?,
        None => {
            let own = socket::local_address(meeting.socket()).map_err(|cause| {
                Error::system("the connection to the meeting has no address", cause)
            })?;
            address_for_all(own.ip(), id)
        }
    };
    let mut member = RankEntry::this(rank, ip, config)?;
    if rank != 0 {
        return Ok((member, None));
    }
    let (mut listener, address) = Listener::bind(ip)?;
    listener.expect_connections(nranks);
    member.control_port = address.port();
    Ok((member, Some(listener)))
}

/// By which of this host's addresses all ranks reach it, where it met at `own`: a loopback address may have
/// answered first, but if the meeting has one besides that is this host's, ranks of other hosts use that.
fn address_for_all(own: IpAddr, id: &UniqueId) -> IpAddr {
    if !own.is_loopback() {
        return own;
    }
    let met = id.addresses().into_iter().map(|address| address.ip());
    let mut others = met.filter(|ip| !ip.is_loopback());
    others.find(|&ip| Listener::bind(ip).is_ok()).unwrap_or(own)
}

/// Connects to the first of the meeting's addresses that answers.
fn reach(
    id: &UniqueId,
    addresses: &[SocketAddr],
    terms: &HandshakeConfig,
    config: &Config,
    deadline: Instant,
    fault: &Fault,
) -> Result<Peer> {
    let on_refusal = if id.rank_zero_opens() {
        OnRefusal::Retry
    } else {
        OnRefusal::Fail
    };
    let last = match connect_to_any(addresses, terms, on_refusal, deadline, fault) {
        Ok(peer) => return Ok(peer),
        Err(last) => last,
    };
    fault.check()?;
    Err(match (last.kind(), on_refusal) {
        (ErrorKind::Remote, OnRefusal::Fail) => last.context(format!(
            "nobody holds the meeting of this unique id: it serves one init and may be used up, \
             its ranks did not all come within CINCH_INIT_TIMEOUT (here {:.1} s), or the process \
             that created it has ended",
            config.init_timeout.as_secs_f64()
        )),
        (_, OnRefusal::Retry) => last.context("rank 0 did not open the meeting"),
        _ => last,
    })
}

fn read_table(body: &[u8], me: &RankEntry, nranks: usize) -> Result<(Vec<RankEntry>, [u8; 32])> {
    let mut reader = Reader(body);
    let salt = reader.array()?;
    if reader.u32()? as usize != nranks {
        return Err(damaged());
    }
    let members: Vec<RankEntry> = (0..nranks)
        .map(|_| RankEntry::read(&mut reader))
        .collect::<Result<_>>()?;
    reader.end()?;
    let in_order = members
        .iter()
        .enumerate()
        .all(|(at, one)| one.info.rank == at);
    if !in_order || members[me.info.rank].info != me.info {
        return Err(damaged());
    }
    Ok((members, salt))
}

#[cfg(test)]
mod tests {
    use super::super::id::assemble;
    use super::*;

    #[test]
    fn a_rank_that_met_at_loopback_has_an_address_for_other_hosts() {
        let id = |texts: &[&str]| {
            let addresses = texts
                .iter()
                .map(|text| format!("{text}:7").parse().unwrap());
            assemble(0, &[1; 32], &[2; 16], &addresses.collect::<Vec<_>>())
        };
        let own = IpAddr::from([127, 0, 1, 1]);
        // Of another host, or nobody's.
        assert_eq!(address_for_all(own, &id(&["192.0.2.1", "127.0.1.1"])), own);
        assert_eq!(address_for_all(own, &id(&["127.0.1.1"])), own);
        let other = IpAddr::from([192, 0, 2, 7]);
        assert_eq!(address_for_all(other, &id(&["127.0.1.1"])), other);
        let Ok(outside) = super::super::address::choose(&Config::default()) else {
            return println!("skipped: this host has no address");
        };
        if !outside.is_loopback() && outside.is_ipv4() {
            let id = id(&[&outside.to_string(), "127.0.1.1"]);
            assert_eq!(address_for_all(own, &id), outside);
        }
    }
}
