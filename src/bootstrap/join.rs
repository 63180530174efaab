//! A rank's side of the rendezvous: it registers its entry and receives the table of all ranks.

use super::auth::{Listener, OnRefusal, Peer, connect_to_any};
use super::framed_stream::{Body, FramedStream};
use super::rank_entry::RankEntry;
use super::rendezvous_server::{
    GIVES_UP, OTHER_PARTICIPANTS, REFUSED, REGISTER, TABLE, handshake, margin, serve,
};
use super::{UniqueId, address, process};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Fault;
use crate::sys::socket::{self, Address};
use crate::wire::{Damaged, Reader, Wire, Writer};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Time for which a rank registers again while the server holds a rendezvous of other ranks: the
/// server's rank learns in that time which further rank has ended.
const OTHER_PARTICIPANTS_TIMEOUT: Duration = Duration::from_secs(3);
/// Interval of these registrations.
const OTHER_PARTICIPANTS_INTERVAL: Duration = Duration::from_millis(20);

/// Result of a rendezvous.
pub(super) struct PeerTable {
    pub(super) members: Vec<RankEntry>,
    /// Random bytes of this rendezvous, so that communicators with the same secret have different
    /// keys.
    pub(super) salt: [u8; 32],
    /// Control listener of rank 0.
    pub(super) listener: Option<Listener>,
}

/// Registers as `rank` of `nranks`, and returns when all ranks have registered.
pub(super) fn rendezvous(
    id: &UniqueId,
    rank: usize,
    nranks: usize,
    config: &Config,
    deadline: Instant,
    fault: &Fault,
) -> Result<PeerTable> {
    let tcp = id.addresses().into_iter().map(Address::Tcp).collect();
    let mut addresses = id.local_socket().map_or(tcp, |socket| vec![socket]);
    if rank == 0 {
        process::check_descriptors(nranks + 8, &format!("rank 0 of {nranks} ranks"))?;
        if id.rank_zero_opens() {
            let opened = match id.local_socket() {
                Some(socket) => Listener::bind_local(socket),
                None => Listener::bind_to_own(&id.addresses()).map(|(listener, bound)| {
                    addresses = bound.into_iter().map(Address::Tcp).collect();
                    listener
                }),
            };
            let listener = opened.map_err(|error| {
                error.context("rank 0 opens the rendezvous, but another job may have the port")
            })?;
            serve(id, listener, config.init_timeout, None)?;
        }
    }
    let mut other_participants = None;
    loop {
        let answer = register(id, &addresses, (rank, nranks), config, deadline, fault)?;
        let refusal = match answer {
            Answer::Table(table) => return Ok(table),
            Answer::OtherParticipants(refusal) => refusal,
        };
        let since = *other_participants.get_or_insert(Instant::now());
        if since.elapsed() >= OTHER_PARTICIPANTS_TIMEOUT || Instant::now() >= deadline {
            return Err(refusal);
        }
        fault.check()?;
        std::thread::sleep(OTHER_PARTICIPANTS_INTERVAL);
    }
}

/// The server's answer to a registration.
enum Answer {
    Table(PeerTable),
    /// The server holds a rendezvous of other ranks of the same communicator.
    OtherParticipants(Error),
}

/// Registers once, and waits for the answer.
fn register(
    id: &UniqueId,
    addresses: &[Address],
    (rank, nranks): (usize, usize),
    config: &Config,
    deadline: Instant,
    fault: &Fault,
) -> Result<Answer> {
    let peer = connect(id, addresses, rank, config, deadline, fault)?;
    let server = match (id.growth(), peer.address) {
        // A new rank knows the rank that may have died from the id only.
        (Some(growth), _) => format!("rank {}, which serves the rendezvous", growth.server),
        (None, Address::Tcp(address)) => format!("the rendezvous at {address}"),
        (None, _) => id.rendezvous_name(),
    };
    let mut stream = FramedStream::new(peer);

    // A rank that cannot register sends the reason, so that no rank waits for it until the
    // deadline.
    let who = format!("rank {rank} (host {})", process::host_name());
    let described = fault
        .check()
        .and_then(|()| describe_self((&stream, id), rank, nranks, config));
    let (entry, listener) = described.inspect_err(|error| give_up(&mut stream, id, &who, error))?;
    // The server counts this time from the arrival of the frame.
    let timeout = deadline.saturating_duration_since(Instant::now());
    let mut writer = Writer::default();
    writer.u32(nranks.min(u32::MAX as usize) as u32);
    for time in [timeout, config.init_timeout] {
        writer.u64(time.as_millis() as u64);
    }
    writer.u32(id.participants());
    entry.write(&mut writer);
    stream.queue(REGISTER, &Body::new(writer.0));

    // Waits beyond this rank's deadline: the server fails earlier, and only the server knows the
    // missing ranks.
    let answer = stream
        .exchange(deadline + margin(timeout), fault)
        .map_err(|error| match fault.check() {
            // The server would take the end of the connection for the death of this rank.
            Err(reason) => {
                give_up(&mut stream, id, &who, &reason);
                reason
            }
            Ok(()) => error.context(&server),
        })?;
    match answer.kind {
        REFUSED => Err(Error::from_bytes(&answer.body)?),
        OTHER_PARTICIPANTS => Ok(Answer::OtherParticipants(Error::from_bytes(&answer.body)?)),
        TABLE => {
            let table = read_table(&answer.body, &entry, nranks);
            let (members, salt) = table.map_err(|error| error.context(&server))?;
            Ok(Answer::Table(PeerTable {
                members,
                salt,
                listener,
            }))
        }
        _ => Err(Error::from(Damaged).context(&server)),
    }
}

/// Sends the server the reason why this rank takes no part.
pub(super) fn give_up(stream: &mut FramedStream, id: &UniqueId, who: &str, reason: &Error) {
    let report = reason.clone().context(who);
    let mut writer = Writer::default();
    writer.u32(id.participants());
    writer.0.extend(report.to_bytes());
    stream.queue(GIVES_UP, &Body::new(writer.0));
    stream.flush();
}

/// Describes this process as a rank that is connected to the server. Rank 0 also starts to listen.
fn describe_self(
    (server, id): (&FramedStream, &UniqueId),
    rank: usize,
    nranks: usize,
    config: &Config,
) -> Result<(RankEntry, Option<Listener>)> {
    // Other ranks reach this host by the address that this host uses towards the server.
    let ip = match (&config.interface, id.local_socket()) {
        (Some(_), _) => address::choose(config)?,
        (None, Some(_)) => address::for_one_host(),
        (None, None) => {
            let own = socket::local_address(server.socket()).map_err(|cause| {
                Error::system("the connection to the rendezvous has no address", cause)
            })?;
            address_for_all(own.ip(), id)
        }
    };
    let mut entry = RankEntry::this(rank, ip, config)?;
    if rank != 0 {
        return Ok((entry, None));
    }
    let (mut listener, address) = Listener::bind(ip)?;
    listener.expect_connections(nranks);
    entry.control_port = address.port();
    Ok((entry, Some(listener)))
}

/// Returns the address of this host by which all ranks reach it; `own` is its end of the connection
/// to the server. If `own` is a loopback address, ranks of other hosts need the id's other address
/// of this host.
fn address_for_all(own: IpAddr, id: &UniqueId) -> IpAddr {
    if !own.is_loopback() {
        return own;
    }
    let known = id.addresses().into_iter().map(|address| address.ip());
    let mut others = known.filter(|ip| !ip.is_loopback());
    others.find(|&ip| Listener::bind(ip).is_ok()).unwrap_or(own)
}

/// Connects to the first of the server's addresses that answers.
fn connect(
    id: &UniqueId,
    addresses: &[Address],
    rank: usize,
    config: &Config,
    deadline: Instant,
    fault: &Fault,
) -> Result<Peer> {
    let on_refusal = match (id.rank_zero_opens(), id.always_listens()) {
        (true, _) => OnRefusal::Retry,
        (false, true) => OnRefusal::RetryClosed,
        (false, false) => OnRefusal::Fail,
    };
    let handshake = handshake(id, rank).with_encryption(config.encrypts.into());
    let last = match connect_to_any(addresses, &handshake, on_refusal, deadline, fault) {
        Ok(peer) => return Ok(peer),
        Err(last) => last,
    };
    fault.check()?;
    Err(match (last.kind(), on_refusal) {
        (ErrorKind::Remote, OnRefusal::Fail) => last.context(format!(
            "nobody serves the rendezvous of this unique id: it serves one init and may be used \
             up, its ranks did not all come within CINCH_INIT_TIMEOUT (here {:.1} s), or {} has ended",
            config.init_timeout.as_secs_f64(),
            match id.growth() {
                Some(growth) => format!("rank {}, which created it,", growth.server),
                None => "the process that created it".into(),
            }
        )),
        (ErrorKind::Remote, OnRefusal::RetryClosed) => {
            last.context("the lowest rank that is left serves no rendezvous, it may have ended")
        }
        (ErrorKind::Timeout, OnRefusal::Retry) => {
            last.context("rank 0 did not open the rendezvous")
        }
        (_, OnRefusal::Retry) => last.context(id.rendezvous_name()),
        _ => last.context("the rendezvous"),
    })
}

pub(super) fn read_table(
    body: &[u8],
    own: &RankEntry,
    nranks: usize,
) -> Result<(Vec<RankEntry>, [u8; 32])> {
    let mut reader = Reader(body);
    let salt = reader.take()?;
    if reader.u32()? as usize != nranks {
        return Err(Damaged.into());
    }
    let members = (0..nranks).map(|_| reader.take());
    let members = members.collect::<crate::wire::WireResult<Vec<RankEntry>>>()?;
    reader.end()?;
    let mut ranks = members.iter().enumerate();
    let in_order = ranks.all(|(at, member)| member.info.rank == at);
    if !in_order || members[own.info.rank].info != own.info {
        return Err(Damaged.into());
    }
    Ok((members, salt))
}

#[cfg(test)]
mod tests {
    use super::super::id::assemble;
    use super::*;

    /// The address alone would not say that no rank is silent, but the rendezvous.
    #[test]
    fn error_of_a_silent_server_names_the_rendezvous() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = silent.local_addr().unwrap();
        let id = assemble(0, &[1; 32], &[2; 16], &[address]);
        let deadline = Instant::now() + Duration::from_millis(100);
        let answer = register(
            &id,
            &[address.into()],
            (1, 2),
            &Config::default(),
            deadline,
            &Fault::new(),
        );
        let error = answer.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        let words = "did not answer the handshake before the deadline";
        assert_eq!(
            error.message(),
            format!("the rendezvous: {address} {words}")
        );
    }

    #[test]
    fn rank_on_loopback_has_an_address_for_other_hosts() {
        let id = |texts: &[&str]| {
            let addresses = texts
                .iter()
                .map(|text| format!("{text}:7").parse().unwrap());
            assemble(0, &[1; 32], &[2; 16], &addresses.collect::<Vec<_>>())
        };
        let own = IpAddr::from([127, 0, 1, 1]);
        // With two addresses in the id, the first belongs to another host.
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
