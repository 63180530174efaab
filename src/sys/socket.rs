//! Non-blocking sockets: listening, connecting, vectored reads and writes, and passing of
//! descriptors.

use super::fork::CloseOnFork;
use super::socket_address::{shared_path, text};
use crate::error::{Error, Result};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType,
    SockaddrStorage, UnixAddr, sockopt,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

pub use super::socket_address::{Address, SHARED_DIRECTORY, SocketFile};

/// A socket that is closed in forked children.
pub type Socket = CloseOnFork<OwnedFd>;

/// Listens on `address` (port 0: any). The socket is closed on exec.
///
/// # Errors
/// The system's errors, such as address in use.
pub fn listen(address: &Address) -> io::Result<Socket> {
    let listener = open(address)?;
    match address {
        Address::Local(name) => nix::sys::socket::bind(listener.as_raw_fd(), &local(name)?)?,
        Address::Shared(name) => nix::sys::socket::bind(listener.as_raw_fd(), &shared(name)?)?,
        Address::Tcp(address) => {
            // Allows to bind a port whose earlier connections are in TIME_WAIT.
            nix::sys::socket::setsockopt(&listener, sockopt::ReuseAddr, &true)?;
            nix::sys::socket::bind(listener.as_raw_fd(), &SockaddrStorage::from(*address))?;
        }
    }
    // The kernel reduces the length to its own limit. A short queue drops SYN packets when a
    // thousand ranks connect together, and each dropped packet costs a second.
    nix::sys::socket::listen(&*listener, Backlog::MAXALLOWABLE)?;
    Ok(listener)
}

/// Listens on a TCP address which other processes of this user may share by this function. The kernel hands each
/// connection to one of them.
///
/// # Errors
/// The system's errors, such as address in use by a socket that is not shared.
pub fn listen_shared(address: SocketAddr) -> io::Result<Socket> {
    let listener = open(&Address::Tcp(address))?;
    nix::sys::socket::setsockopt(&listener, sockopt::ReuseAddr, &true)?;
    nix::sys::socket::setsockopt(&listener, sockopt::ReusePort, &true)?;
    nix::sys::socket::bind(listener.as_raw_fd(), &SockaddrStorage::from(address))?;
    nix::sys::socket::listen(&*listener, Backlog::MAXALLOWABLE)?;
    Ok(listener)
}

/// Returns the address and port of this end of a TCP socket.
///
/// # Errors
/// The system's errors; unsupported for a socket of another family.
pub fn local_address(socket: &OwnedFd) -> io::Result<SocketAddr> {
    let storage: SockaddrStorage = nix::sys::socket::getsockname(socket.as_raw_fd())?;
    ip_address(&storage).ok_or_else(|| io::ErrorKind::Unsupported.into())
}

/// Returns the address of the other end. For every UNIX socket this is a name of zeros.
///
/// # Errors
/// The system's errors, such as not connected.
pub fn peer_address(socket: &OwnedFd) -> io::Result<Address> {
    let storage: SockaddrStorage = nix::sys::socket::getpeername(socket.as_raw_fd())?;
    Ok(ip_address(&storage).map_or(Address::Local([0; 16]), Address::Tcp))
}

fn ip_address(storage: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = storage.as_sockaddr_in().map(|v4| SocketAddrV4::from(*v4));
    let v6 = storage.as_sockaddr_in6().map(|v6| SocketAddrV6::from(*v6));
    v4.map(SocketAddr::V4).or(v6.map(SocketAddr::V6))
}

/// Returns whether the error is a lack of descriptors or memory, so that the call may succeed
/// later.
pub fn is_shortage(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
    )
}

/// Accepts the next connection that waits at `listener`, or returns `None`.
///
/// # Errors
/// The system's errors. A connection that ended while it waited is skipped without an error.
pub fn accept(listener: &OwnedFd) -> io::Result<Option<Socket>> {
    loop {
        let accepted = CloseOnFork::open(|| {
            // SAFETY: a null address is allowed, and a non-negative result is a new descriptor that
            // only this call owns.
            unsafe {
                let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
                let null = std::ptr::null_mut();
                match libc::accept4(listener.as_raw_fd(), null, std::ptr::null_mut(), flags) {
                    fd @ 0.. => Ok(OwnedFd::from_raw_fd(fd)),
                    _ => Err(io::Error::last_os_error()),
                }
            }
        });
        let error = match accepted {
            Ok(socket) => return Ok(Some(socket)),
            Err(error) => error,
        };
        match error.raw_os_error() {
            Some(libc::EAGAIN) => return Ok(None),
            // The manual page accept(2) advises to treat errors of the accepted connection like
            // EAGAIN.
            Some(
                libc::EINTR
                | libc::ECONNABORTED
                | libc::ENETDOWN
                | libc::EPROTO
                | libc::EHOSTDOWN
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH,
            ) => {}
            _ => return Err(error),
        }
    }
}

/// Starts to connect to `address`. Once the socket polls writable, [`connect_result`] returns the
/// result.
///
/// # Errors
/// The system's errors.
pub fn connect(address: &Address) -> io::Result<Socket> {
    let socket = open(address)?;
    let done = match address {
        Address::Local(name) => nix::sys::socket::connect(socket.as_raw_fd(), &local(name)?),
        Address::Shared(name) => nix::sys::socket::connect(socket.as_raw_fd(), &shared(name)?),
        Address::Tcp(address) => {
            nix::sys::socket::connect(socket.as_raw_fd(), &SockaddrStorage::from(*address))
        }
    };
    match done {
        Ok(()) | Err(nix::errno::Errno::EINPROGRESS) => Ok(socket),
        Err(error) => Err(error.into()),
    }
}

/// Connects to the socket file at `path`, without waiting for the process that listens there.
///
/// # Errors
/// The system's errors; would-block if the queue of the listener is full.
pub fn connect_file(path: &Path) -> io::Result<Socket> {
    let socket = open(&Address::Local([0; 16]))?;
    nix::sys::socket::connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket)
}

/// Returns the result of [`connect`], or the error that has ended a connection.
///
/// # Errors
/// The error of the connection.
pub fn connect_result(socket: &OwnedFd) -> io::Result<()> {
    match nix::sys::socket::getsockopt(socket, sockopt::SocketError)? {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Returns the user id of the process at the other end of a UNIX socket.
///
/// # Errors
/// System if the kernel does not return it.
pub fn peer_uid(socket: &OwnedFd) -> Result<u32> {
    nix::sys::socket::getsockopt(socket, sockopt::PeerCredentials)
        .map(|credentials| credentials.uid())
        .map_err(|error| {
            Error::system("reading the user of the other end of a local socket", error)
        })
}

/// Disables Nagle's algorithm, which delays small writes.
///
/// # Errors
/// System if the option cannot be set.
pub fn no_delay(socket: &OwnedFd) -> Result<()> {
    nix::sys::socket::setsockopt(socket, sockopt::TcpNoDelay, &true)
        .map_err(|error| Error::system("setting TCP_NODELAY", error))
}

/// Makes the kernel end an idle connection whose peer's host does not answer: after 1 s and 3
/// probes of 1 s each. The kernel's default takes hours. For a connection with unacknowledged data
/// see [`unacknowledged_time`].
///
/// TCP_USER_TIMEOUT cannot be used: since Linux 5.11 it also ends a connection whose peer answers
/// but does not read. A rank may compute, or be stopped, for much longer. In a measurement, a limit
/// of 3 s ended such a connection after 3.6 s.
///
/// # Errors
/// System if an option cannot be set.
pub fn keep_alive(socket: &OwnedFd) -> Result<()> {
    let set = || -> nix::Result<()> {
        nix::sys::socket::setsockopt(socket, sockopt::KeepAlive, &true)?;
        nix::sys::socket::setsockopt(socket, sockopt::TcpKeepIdle, &1)?;
        nix::sys::socket::setsockopt(socket, sockopt::TcpKeepInterval, &1)?;
        nix::sys::socket::setsockopt(socket, sockopt::TcpKeepCount, &3)
    };
    set().map_err(|error| Error::system("setting keep-alive options", error))
}

/// Returns the time since the peer's host last acknowledged anything, if data or probes were repeated at
/// least three times. Returns `None` for a host that answers, even if its program does not read, and for
/// sockets other than TCP.
pub fn unacknowledged_time(socket: &OwnedFd) -> Option<Duration> {
    // SAFETY: `tcp_info` is plain data, valid as zero, and `size` is its size. Older kernels fill
    // only a first part of it, which contains the fields that are read.
    let info = unsafe {
        let mut info: libc::tcp_info = std::mem::zeroed();
        let mut size = size_of::<libc::tcp_info>() as libc::socklen_t;
        let place = (&raw mut info).cast();
        let fd = socket.as_raw_fd();
        match libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, place, &mut size) {
            0 => info,
            _ => return None,
        }
    };
    let repeats = info.tcpi_retransmits + info.tcpi_probes;
    (repeats >= 3).then(|| Duration::from_millis(info.tcpi_last_ack_recv.into()))
}

/// Reads into `parts` in order. Returns 0 if the peer has closed.
///
/// # Errors
/// The system's errors; would-block if no bytes have arrived.
#[inline]
pub fn read(socket: &OwnedFd, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    // SAFETY: `IoSliceMut` has the layout of `iovec`, and `parts` outlives the call.
    result(unsafe {
        libc::readv(
            socket.as_raw_fd(),
            parts.as_mut_ptr().cast(),
            parts.len() as libc::c_int,
        )
    })
}

/// Writes `parts` in order, as far as the kernel takes them. Raises no SIGPIPE.
///
/// # Errors
/// The system's errors; would-block if the kernel takes nothing now.
#[inline]
pub fn write(socket: &OwnedFd, parts: &[IoSlice<'_>]) -> io::Result<usize> {
    #[cfg(test)]
    recording::record(parts);
    // SAFETY: `IoSlice` has the layout of `iovec`, and the kernel only reads `parts`, which
    // outlives the call. Zero is valid for the other fields.
    result(unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        message.msg_iov = parts.as_ptr().cast_mut().cast();
        message.msg_iovlen = parts.len() as _;
        libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL)
    })
}

/// Sends a descriptor over a UNIX socket.
///
/// # Errors
/// The system's errors.
pub fn send_descriptor(socket: &OwnedFd, descriptor: &OwnedFd) -> io::Result<()> {
    let descriptors = [descriptor.as_raw_fd()];
    let control = [ControlMessage::ScmRights(&descriptors)];
    nix::sys::socket::sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(b"m")],
        &control,
        MsgFlags::MSG_NOSIGNAL,
        None,
    )?;
    Ok(())
}

/// Receives one descriptor from a UNIX socket, closed on exec.
///
/// # Errors
/// The system's errors; would-block if nothing has arrived; invalid data for any other number of
/// descriptors.
pub fn receive_descriptor(socket: &OwnedFd) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut space = nix::cmsg_space!([RawFd; 4]);
    let mut parts = [IoSliceMut::new(&mut byte)];
    let message = nix::sys::socket::recvmsg::<()>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )?;
    let mut found = Vec::new();
    for control in message.cmsgs()? {
        if let ControlMessageOwned::ScmRights(descriptors) = control {
            // SAFETY: the kernel has made these descriptors for this call, so nothing else owns
            // them.
            found.extend(
                descriptors
                    .into_iter()
                    .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
            );
        }
    }
    if message.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match found.pop() {
        Some(descriptor) if found.is_empty() => Ok(descriptor),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "expected one descriptor",
        )),
    }
}

/// The events to poll for on one socket, and the events that happened.
pub type Interest = libc::pollfd;

/// Returns an entry for [`poll`] with the events `read` and `write`; `poll` always reports errors.
pub fn interest(socket: &OwnedFd, read: bool, write: bool) -> Interest {
    Interest {
        fd: socket.as_raw_fd(),
        events: if read { libc::POLLIN } else { 0 } | if write { libc::POLLOUT } else { 0 },
        revents: 0,
    }
}

/// Waits until an entry has an event, at most `limit`. Returns the number of entries with events,
/// or 0 after a signal.
///
/// # Errors
/// System if the kernel refuses the call.
pub fn poll(interests: &mut [Interest], limit: Duration) -> Result<usize> {
    let timeout = libc::timespec {
        tv_sec: limit.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: libc::c_long::from(limit.subsec_nanos() as i32),
    };
    // SAFETY: `interests` and `timeout` outlive the call; a null mask leaves the signal mask as it
    // is.
    let count = unsafe {
        libc::ppoll(
            interests.as_mut_ptr(),
            interests.len() as libc::nfds_t,
            &timeout,
            std::ptr::null(),
        )
    };
    match usize::try_from(count) {
        Ok(count) => Ok(count),
        Err(_) => {
            let error = io::Error::last_os_error();
            interests
                .iter_mut()
                .for_each(|interest| interest.revents = 0);
            if error.kind() == io::ErrorKind::Interrupted {
                Ok(0)
            } else {
                let what = format!("waiting for {} sockets", interests.len());
                Err(Error::system(what, error))
            }
        }
    }
}

/// Returns the largest number of descriptors that this process may have open.
pub fn descriptor_limit() -> usize {
    // SAFETY: `limit` is plain data, valid as zero, and outlives the call.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        match libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) {
            0 => usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX),
            _ => usize::MAX,
        }
    }
}

fn open(address: &Address) -> nix::Result<Socket> {
    let family = match address {
        Address::Local(_) | Address::Shared(_) => AddressFamily::Unix,
        Address::Tcp(SocketAddr::V4(_)) => AddressFamily::Inet,
        Address::Tcp(SocketAddr::V6(_)) => AddressFamily::Inet6,
    };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    CloseOnFork::open(|| nix::sys::socket::socket(family, SockType::Stream, flags, None))
}

fn local(name: &[u8; 16]) -> nix::Result<UnixAddr> {
    UnixAddr::new_abstract(&text(name))
}

fn shared(name: &[u8; 16]) -> nix::Result<UnixAddr> {
    UnixAddr::new(&shared_path(name))
}

/// Age from which a socket file at which nobody listens is left over: the process of a younger one may be about to
/// listen.
const STALE_AGE: Duration = Duration::from_secs(60);
/// Number of names in [`SHARED_DIRECTORY`] that are looked at.
const MAX_NAMES: usize = 4096;

/// Removes the socket files in [`SHARED_DIRECTORY`] that killed processes of this user have left.
pub fn remove_stale_files() {
    // A process that cannot read the directory leaves the files to another job.
    let names = std::fs::read_dir(SHARED_DIRECTORY).into_iter().flatten();
    for name in names.take(MAX_NAMES).flatten() {
        if is_stale(&name).unwrap_or(false) {
            let _ = std::fs::remove_file(name.path());
        }
    }
}

fn is_stale(entry: &std::fs::DirEntry) -> io::Result<bool> {
    let name = entry.file_name();
    if name.len() != text(&[0; 16]).len() || !name.as_bytes().starts_with(b"cinch-") {
        return Ok(false);
    }
    let known = entry.metadata()?;
    let is_own = known.uid() == nix::unistd::geteuid().as_raw();
    let is_old = known
        .modified()?
        .elapsed()
        .is_ok_and(|age| age >= STALE_AGE);
    Ok(is_own
        && is_old
        && known.file_type().is_socket()
        && connect_file(&entry.path())
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused))
}

fn result(count: isize) -> io::Result<usize> {
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

/// A record of the bytes that this process writes to sockets, for tests.
#[cfg(test)]
pub(crate) mod recording {
    use std::io::IoSlice;
    use std::sync::{Mutex, PoisonError};

    /// `None` while no test records.
    static WRITTEN: Mutex<Option<Vec<u8>>> = Mutex::new(None);

    /// Starts a record.
    pub(crate) fn start() {
        *WRITTEN.lock().unwrap_or_else(PoisonError::into_inner) = Some(Vec::new());
    }

    /// Ends the record and returns it.
    pub(crate) fn stop() -> Vec<u8> {
        let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
        written.take().unwrap_or_default()
    }

    pub(super) fn record(parts: &[IoSlice<'_>]) {
        let mut written = WRITTEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(written) = &mut *written {
            parts
                .iter()
                .for_each(|part| written.extend_from_slice(part));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_file_is_removed_with_its_value() {
        let address = Address::Shared(*b"test of a file!!");
        let file = SocketFile::of(&address).unwrap();
        drop(connected_pair(address));
        assert!(shared_path(b"test of a file!!").exists());
        drop(file);
        assert!(!shared_path(b"test of a file!!").exists());
        assert!(SocketFile::of(&Address::Local([0; 16])).is_none());
    }

    fn connected_pair(address: Address) -> (Socket, Socket) {
        let listener = listen(&address).unwrap();
        assert!(accept(&listener).unwrap().is_none());
        let address = match address {
            Address::Tcp(mut address) => {
                address.set_port(local_address(&listener).unwrap().port());
                Address::Tcp(address)
            }
            local => local,
        };
        let here = connect(&address).unwrap();
        let mut interests = [
            interest(&here, false, true),
            interest(&listener, true, false),
        ];
        while interests.iter().any(|interest| interest.revents == 0) {
            poll(&mut interests, Duration::from_secs(5)).unwrap();
        }
        connect_result(&here).unwrap();
        (here, accept(&listener).unwrap().unwrap())
    }

    #[test]
    fn bytes_and_the_end_of_a_connection_arrive() {
        for address in [
            Address::Local(*b"test of sockets!"),
            Address::Tcp("127.0.0.1:0".parse().unwrap()),
        ] {
            let (here, there) = connected_pair(address);
            assert_eq!(
                write(&here, &[IoSlice::new(b"ab"), IoSlice::new(b"c")]).unwrap(),
                3
            );
            poll(&mut [interest(&there, true, false)], Duration::from_secs(5)).unwrap();
            let (mut one, mut two) = ([0; 1], [0; 9]);
            let mut parts = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
            assert_eq!(read(&there, &mut parts).unwrap(), 3);
            assert_eq!((&one, &two[..2]), (b"a", &b"bc"[..]));
            let mut parts = [IoSliceMut::new(&mut one)];
            let error = read(&there, &mut parts).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            drop(here);
            poll(&mut [interest(&there, true, false)], Duration::from_secs(5)).unwrap();
            assert_eq!(read(&there, &mut parts).unwrap(), 0);
        }
    }

    #[test]
    fn descriptor_is_received_and_a_plain_message_refused() {
        let (here, there) = connected_pair(Address::Local(*b"test of passing!"));
        assert_eq!(peer_uid(&there).unwrap(), nix::unistd::geteuid().as_raw());
        let sent = crate::sys::memory::sealed_memfd(1).unwrap();
        send_descriptor(&here, &sent).unwrap();
        let received = receive_descriptor(&there).unwrap();
        let inode = |fd: &OwnedFd| nix::sys::stat::fstat(fd).unwrap().st_ino;
        assert_eq!(inode(&sent), inode(&received));
        write(&here, &[IoSlice::new(b"x")]).unwrap();
        let error = receive_descriptor(&there).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
