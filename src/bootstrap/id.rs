//! The unique id: addresses of the rendezvous, and the secret of the ranks that may join.
//!
//! | bytes | content |
//! | --- | --- |
//! | 0 | format, 1 |
//! | 1 | flags; bit 0: rank 0 serves the rendezvous, at the address given; bit 1: the address listens as long as its process lives; bit 2: the rendezvous is a UNIX socket of one user; bit 3: new ranks join a communicator |
//! | 4..36 | secret |
//! | 36..52 | nonce, different for every id |
//! | 52..80, 80..108 | addresses of the rendezvous: family (0 none, 4, 6), pad, port, IP, scope, pad |
//! | 108..112 | digest of the ranks that take part in a reconnect; with bit 3, the number of ranks before new ones join, and the rank that serves; else 0 |
//! | 112..128 | start of the SHA-256 of bytes 0..112 |

use super::{UniqueId, address, idle_rendezvous, keys, rendezvous_server};
use crate::config::Config;
use crate::error::{Error, ErrorKind, Result};
use crate::sys::socket::Address;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

pub(super) const FORMAT: u8 = 1;
const RANK_ZERO_OPENS: u8 = 1;
const ALWAYS_LISTENS: u8 = 2;
const ONE_USER: u8 = 4;
pub(super) const GROWS: u8 = 8;
const ADDRESS_BYTES: usize = 28;
pub(super) const SECRET: std::ops::Range<usize> = 4..36;
pub(super) const NONCE: std::ops::Range<usize> = 36..52;
const ADDRESSES: [usize; 2] = [52, 80];
pub(super) const PARTICIPANTS: usize = 108;
pub(super) const CHECKSUM: usize = 112;

/// Shortest secret in a file, in bytes.
const SECRET_FILE_MIN: usize = 16;
/// Longest secret in a file, in bytes.
const SECRET_FILE_MAX: usize = 4096;

impl UniqueId {
    /// Makes a new id and serves its rendezvous in this process, on the interface that `config`
    /// chooses. The thread serves one communicator and ends with its init, or after
    /// [`Config::init_timeout`].
    ///
    /// # Errors
    /// System if the address cannot be listened on; timeout if the thread that ends unused ids does not run; invalid
    /// argument for an unknown interface.
    pub fn create(config: &Config) -> Result<UniqueId> {
        UniqueId::create_at(address::choose(config)?, config)
    }

    /// Makes an id as [`UniqueId::create`] does, for ranks that all run on this host. The
    /// rendezvous listens on the loopback address only, unless `CINCH_SOCKET_IFNAME` names an
    /// interface.
    ///
    /// # Errors
    /// As for [`UniqueId::create`].
    pub fn create_for_one_host(config: &Config) -> Result<UniqueId> {
        match config.interface {
            Some(_) => UniqueId::create(config),
            None => UniqueId::create_at(address::for_one_host(), config),
        }
    }

    fn create_at(ip: IpAddr, config: &Config) -> Result<UniqueId> {
        let (secret, nonce) = (keys::random::<32>()?, keys::random::<16>()?);
        idle_rendezvous::open(
            ip,
            |address| assemble(0, &secret, &nonce, &[address]),
            config,
        )
    }

    /// Makes the id of ranks that know only `host:port`. Rank 0 listens on that port, at the first
    /// two of the name's addresses that belong to its host. Debian's `/etc/hosts` maps the name of
    /// a host to a loopback address on that host only. With a secret, the address of
    /// [`UniqueId::create`] therefore comes before a loopback address.
    ///
    /// The secret comes from the file that `CINCH_SECRET_FILE` names. Without a secret, only
    /// loopback addresses are allowed. Other users of this host can reach them, so the rendezvous then
    /// is a UNIX socket whose name follows from the port, and both ends compare their users.
    /// `CINCH_ALLOW_UNAUTHENTICATED=1` allows any address, by TCP and without authentication.
    ///
    /// # Errors
    /// Invalid argument if the host has no address; system if it cannot be looked up, timeout if that takes
    /// longer than `CINCH_INIT_TIMEOUT`; invalid usage if a
    /// secret is needed, or if others than its owner can read the file.
    pub fn for_address(host: &str, port: u16, config: &Config) -> Result<UniqueId> {
        let named: Vec<SocketAddr> =
            address::look_up(host, port, config.init_timeout).map_err(|cause| {
                match cause.raw_os_error() {
                    // The resolver failed, so nothing is known of the name.
                    Some(_) => {
                        Error::system(format!("looking up the rendezvous host {host}"), cause)
                    }
                    None if cause.kind() == std::io::ErrorKind::TimedOut => Error::new(
                        ErrorKind::Timeout,
                        format!(
                            "looking up the rendezvous host {host} took longer than {:.1} s \
                             (CINCH_INIT_TIMEOUT)",
                            config.init_timeout.as_secs_f64()
                        ),
                    ),
                    None => Error::invalid_argument(format!(
                        "the rendezvous host {host} has no address: {cause}"
                    )),
                }
            })?;
        let another =
            match config.secret_file.is_some() && names_one_host(host) && all_loopback(&named) {
                false => None,
                true => match address::choose(config) {
                    Ok(ip) => Some(SocketAddr::new(ip, port)),
                    Err(error) if config.interface.is_some() => return Err(error),
                    // The listening address is optional unless `CINCH_SOCKET_IFNAME` is set.
                    Err(_) => None,
                },
            };
        let addresses = rendezvous_addresses(named, another);
        if addresses.is_empty() {
            return Err(Error::invalid_argument(format!(
                "the rendezvous host {host} has no address"
            )));
        }
        let mut flags = RANK_ZERO_OPENS;
        let secret = match &config.secret_file {
            Some(path) => keys::derive(&read_secret(path)?, b"", "cinch secret file"),
            None if all_loopback(&addresses) && !config.allow_unauthenticated => {
                flags |= ONE_USER;
                keys::derive(b"cinch: no secret", b"", "one user")
            }
            None => {
                let local = all_loopback(&addresses);
                if !local && !config.allow_unauthenticated {
                    return Err(Error::invalid_usage(format!(
                        "ranks that join at {host}:{port} share no secret: write one to \
                         a file that only you can read and name it in CINCH_SECRET_FILE, or set \
                         CINCH_ALLOW_UNAUTHENTICATED=1 on a network that you trust"
                    )));
                }
                if !local {
                    super::warning_hook::WarningHook::log().warn(&format!(
                        "connections for {host}:{port} are not authenticated \
                         (CINCH_ALLOW_UNAUTHENTICATED=1)"
                    ));
                }
                keys::derive(b"cinch: no secret", b"", "no secret")
            }
        };
        Ok(assemble(flags, &secret, &[0; 16], &addresses))
    }

    /// Reads an id from its bytes.
    ///
    /// # Errors
    /// Invalid argument if the bytes were never filled in, are damaged, or of another version.
    pub fn from_bytes(bytes: &[u8; 128]) -> Result<UniqueId> {
        if bytes.iter().all(|&byte| byte == 0) {
            return Err(Error::invalid_argument(
                "the unique id is all zeros: it was not handed on from the rank that created it",
            ));
        }
        if bytes[0] != FORMAT {
            return Err(Error::invalid_argument(format!(
                "the unique id has format {}, cinch {} knows format {FORMAT}: it is damaged or \
                 was made by another version",
                bytes[0],
                crate::VERSION
            )));
        }
        if bytes[CHECKSUM..] != checksum(bytes) {
            return Err(Error::invalid_argument(
                "the unique id is damaged: its checksum is wrong; hand on all of its 128 bytes",
            ));
        }
        let id = UniqueId(*bytes);
        if id.addresses().is_empty() {
            return Err(Error::invalid_argument("the unique id names no address"));
        }
        Ok(id)
    }

    /// Reads an id from bytes of unknown number.
    ///
    /// # Errors
    /// As for [`UniqueId::from_bytes`]; invalid argument if there are not 128 bytes.
    pub fn from_slice(bytes: &[u8]) -> Result<UniqueId> {
        let bytes = bytes.try_into().map_err(|_| {
            Error::invalid_argument(format!(
                "a unique id has 128 bytes, these are {}",
                bytes.len()
            ))
        })?;
        UniqueId::from_bytes(bytes)
    }

    /// Writes the id as 256 hexadecimal digits. They contain the secret: do not log them.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads the id that [`UniqueId::to_hex`] wrote.
    ///
    /// # Errors
    /// As for [`UniqueId::from_bytes`].
    pub fn from_hex(text: &str) -> Result<UniqueId> {
        let digits: Option<Vec<u8>> = text
            .trim()
            .chars()
            .map(|c| c.to_digit(16).map(|digit| digit as u8))
            .collect();
        match digits {
            Some(digits) if digits.len() == 256 => {
                let bytes: Vec<u8> = digits.chunks(2).map(|two| two[0] << 4 | two[1]).collect();
                UniqueId::from_slice(&bytes)
            }
            _ => Err(Error::invalid_argument(format!(
                "a unique id is written as 256 hexadecimal digits, this text has {} characters",
                text.trim().chars().count()
            ))),
        }
    }

    /// Returns four bytes that tell ids apart and reveal nothing about the secret: for logs.
    pub fn fingerprint(&self) -> [u8; 4] {
        let key = keys::derive(&self.0[SECRET], &self.0[NONCE], "fingerprint");
        std::array::from_fn(|at| key[at])
    }

    /// Ends the rendezvous of an id that was created in this process and will not be used.
    pub fn cancel(&self) {
        rendezvous_server::cancel(self);
    }

    /// Fails the rendezvous of an id that was created in this process. Ranks that have registered,
    /// and ranks that register soon after, receive the reason.
    pub(crate) fn cancel_because(&self, reason: &Error) {
        rendezvous_server::fail(self, reason);
    }

    /// Returns whether rank 0 serves the rendezvous at the address given.
    pub(super) fn rank_zero_opens(&self) -> bool {
        self.0[1] & RANK_ZERO_OPENS != 0
    }

    /// Returns whether the address listens as long as its process lives, and closes connections until
    /// the rendezvous is served.
    pub(super) fn always_listens(&self) -> bool {
        self.0[1] & ALWAYS_LISTENS != 0
    }

    /// Returns the UNIX socket of the rendezvous; `None` if it listens by TCP. Ranks that know the port
    /// know its name.
    pub(super) fn local_socket(&self) -> Option<Address> {
        let port = self.addresses().first()?.port();
        let name = keys::digest(&[b"cinch rendezvous", &port.to_le_bytes()]);
        let name = std::array::from_fn(|at| name[at]);
        (self.0[1] & ONE_USER != 0).then_some(Address::Local(name))
    }

    /// Names the rendezvous by the first address of the id, for messages.
    pub(super) fn rendezvous_name(&self) -> String {
        let address = self.addresses().into_iter().next();
        address.map_or_else(
            || "the rendezvous".into(),
            |address| format!("the rendezvous for {address}"),
        )
    }

    /// Returns a digest of the ranks that take part in a reconnect, which is equal on all of them; 0
    /// in other ids.
    pub(super) fn participants(&self) -> u32 {
        if self.growth().is_some() {
            return 0;
        }
        u32::from_le_bytes(std::array::from_fn(|at| self.0[PARTICIPANTS + at]))
    }

    /// Returns bytes that differ for every created id.
    pub(super) fn nonce(&self) -> &[u8] {
        &self.0[NONCE]
    }

    /// Derives a key of this id for `purpose`.
    pub(super) fn key(&self, salt: &[u8], purpose: &str) -> keys::DerivedKey {
        keys::derive(&self.0[SECRET], &[self.nonce(), salt].concat(), purpose)
    }

    /// Returns the one or two addresses of the rendezvous.
    pub(super) fn addresses(&self) -> Vec<SocketAddr> {
        ADDRESSES
            .into_iter()
            .filter_map(|at| read_address(&self.0[at..at + ADDRESS_BYTES]))
            .collect()
    }
}

/// Returns whether `host` is the name of one host. Such a name has a loopback address on that host
/// only.
fn names_one_host(host: &str) -> bool {
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    let first = name.split('.').next().unwrap_or_default();
    let names_every_host = matches!(
        first,
        "localhost" | "localhost4" | "localhost6" | "ip6-localhost" | "ip6-loopback"
    ) || name.ends_with(".localhost");
    host.parse::<IpAddr>().is_err() && !names_every_host
}

fn all_loopback(addresses: &[SocketAddr]) -> bool {
    addresses.iter().all(|address| address.ip().is_loopback())
}

/// Chooses from the addresses of a host name and, if given, `another` address. Loopback addresses
/// come last: ranks of rank 0's host give the first address to ranks of other hosts.
fn rendezvous_addresses(named: Vec<SocketAddr>, another: Option<SocketAddr>) -> Vec<SocketAddr> {
    let mut addresses = named;
    addresses.extend(another);
    addresses.sort_by_key(|address| (address.ip().is_loopback(), address.is_ipv6()));
    addresses.dedup();
    addresses.truncate(ADDRESSES.len());
    addresses
}

pub(super) fn assemble(
    flags: u8,
    secret: &[u8; 32],
    nonce: &[u8; 16],
    addresses: &[SocketAddr],
) -> UniqueId {
    let mut bytes = [0; 128];
    bytes[0] = FORMAT;
    bytes[1] = flags;
    bytes[SECRET].copy_from_slice(secret);
    bytes[NONCE].copy_from_slice(nonce);
    for (at, address) in ADDRESSES.into_iter().zip(addresses) {
        write_address(&mut bytes[at..at + ADDRESS_BYTES], address);
    }
    let sum = checksum(&bytes);
    bytes[CHECKSUM..].copy_from_slice(&sum);
    UniqueId(bytes)
}

/// Makes the id by which the ranks `participants` of a communicator with `key` reconnect at `address`.
/// Its secret and nonce are those of every reconnect of the communicator, so that ranks that disagree
/// about the participants can still name each other.
pub(super) fn assemble_reconnect(
    key: &keys::DerivedKey,
    address: SocketAddr,
    participants: &[usize],
) -> UniqueId {
    let secret = keys::derive(key, b"", "secret");
    let nonce = keys::derive(key, b"", "nonce");
    let nonce: [u8; 16] = std::array::from_fn(|at| nonce[at]);
    let flags = match participants {
        [_] => RANK_ZERO_OPENS,
        _ => ALWAYS_LISTENS,
    };
    let mut id = assemble(flags, &secret, &nonce, &[address]);
    let ranks: Vec<u8> = participants
        .iter()
        .flat_map(|&rank| (rank as u64).to_le_bytes())
        .collect();
    let digest = keys::digest(&[b"cinch reconnect", &ranks]);
    id.0[PARTICIPANTS..CHECKSUM].copy_from_slice(&digest[..CHECKSUM - PARTICIPANTS]);
    let sum = checksum(&id.0);
    id.0[CHECKSUM..].copy_from_slice(&sum);
    id
}

pub(super) fn checksum(bytes: &[u8; 128]) -> [u8; 16] {
    let hash = keys::digest(&[b"cinch id", &bytes[..CHECKSUM]]);
    std::array::from_fn(|at| hash[at])
}

fn write_address(to: &mut [u8], address: &SocketAddr) {
    to[2..4].copy_from_slice(&address.port().to_le_bytes());
    match address {
        SocketAddr::V4(v4) => {
            to[0] = 4;
            to[4..8].copy_from_slice(&v4.ip().octets());
        }
        SocketAddr::V6(v6) => {
            to[0] = 6;
            to[4..20].copy_from_slice(&v6.ip().octets());
            to[20..24].copy_from_slice(&v6.scope_id().to_le_bytes());
        }
    }
}

fn read_address(from: &[u8]) -> Option<SocketAddr> {
    let port = u16::from_le_bytes([from[2], from[3]]);
    match from[0] {
        4 => {
            let octets: [u8; 4] = from[4..8].try_into().ok()?;
            Some(SocketAddr::new(Ipv4Addr::from(octets).into(), port))
        }
        6 => {
            let octets: [u8; 16] = from[4..20].try_into().ok()?;
            let scope = u32::from_le_bytes(from[20..24].try_into().ok()?);
            let ip = Ipv6Addr::from(octets);
            Some(SocketAddrV6::new(ip, port, 0, scope).into())
        }
        _ => None,
    }
}

fn read_secret(path: &Path) -> Result<Vec<u8>> {
    let shown = path.display();
    let failed = |cause| Error::system(format!("the secret file {shown} cannot be read"), cause);
    // Without O_NONBLOCK, opening a FIFO waits for a writer.
    let file = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(failed)?;
    // Metadata of the open file: the path may name another file by now.
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file()
        || metadata.mode() & 0o077 != 0
        || metadata.uid() != nix::unistd::geteuid().as_raw()
    {
        return Err(Error::invalid_usage(format!(
            "the secret file {shown} has mode {:o} and owner {}: it must be a plain file that you \
             own and only you can read (chmod 600)",
            metadata.mode() & 0o7777,
            metadata.uid()
        )));
    }
    let mut secret = Vec::new();
    file.take(SECRET_FILE_MAX as u64 + 1)
        .read_to_end(&mut secret)
        .map_err(failed)?;
    if !(SECRET_FILE_MIN..=SECRET_FILE_MAX).contains(&secret.len()) {
        return Err(Error::invalid_usage(format!(
            "the secret file {shown} must hold {SECRET_FILE_MIN} to {SECRET_FILE_MAX} bytes \
             (head -c 32 /dev/urandom)"
        )));
    }
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn secret_file_that_is_a_fifo_is_refused_at_once() {
        let path = std::env::temp_dir().join(format!("cinch-secret-{}", std::process::id()));
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let error = read_secret(&path).unwrap_err();
        assert!(error.message().contains("plain file"), "{error}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn id_in_hexadecimal_is_read_back() {
        let config = Config::default();
        let id = UniqueId::create_for_one_host(&config).unwrap();
        let back = UniqueId::from_hex(&id.to_hex()).unwrap();
        assert!(back == id && back.fingerprint() == id.fingerprint());
        assert!(id.addresses()[0].ip().is_loopback());
        let other = UniqueId::create_for_one_host(&config).unwrap();
        assert_ne!(other.fingerprint(), id.fingerprint());
        assert!(!format!("{id:?}").contains(&format!("{}", id.0[4])));
        id.cancel();
        other.cancel();
    }

    #[test]
    fn id_holds_addresses_of_both_families() {
        let addresses = ["10.1.2.3:65535", "[fe80::1%7]:1"].map(|text| text.parse().unwrap());
        let id = assemble(0, &[1; 32], &[2; 16], &addresses);
        assert_eq!(UniqueId::from_bytes(&id.0).unwrap().addresses(), addresses);
    }

    /// Debian's `/etc/hosts` maps the host's own name to 127.0.1.1.
    #[test]
    fn name_with_a_loopback_address_gets_another_address_first() {
        let of = |named: &[&str], another: Option<&str>| -> Vec<String> {
            let address = |text: &&str| format!("{text}:7").parse().unwrap();
            let named = named.iter().map(address).collect();
            let found = rendezvous_addresses(named, another.as_ref().map(address));
            found.iter().map(|one| one.ip().to_string()).collect()
        };
        assert_eq!(of(&["127.0.1.1"], None), ["127.0.1.1"]);
        let both = ["10.1.0.7", "127.0.1.1"];
        assert_eq!(of(&["127.0.1.1"], Some("10.1.0.7")), both);
        assert_eq!(of(&["[::1]", "127.0.1.1"], Some("10.1.0.7")), both);
        assert_eq!(of(&["127.0.1.1", "10.1.0.7"], None), both);
        assert_eq!(of(&["127.0.0.1"], Some("127.0.0.1")), ["127.0.0.1"]);
        for name in ["node7", "node7.example.org", "localhosts"] {
            assert!(names_one_host(name), "{name}");
        }
        for name in [
            "localhost",
            "localhost6.localdomain6",
            "LocalHost.localdomain",
            "a.localhost.",
            "ip6-loopback",
            "127.0.1.1",
            "::1",
        ] {
            assert!(!names_one_host(name), "{name}");
        }
    }

    #[test]
    fn damaged_id_is_refused_with_the_reason() {
        let id = assemble(0, &[1; 32], &[2; 16], &["10.1.2.3:4".parse().unwrap()]);
        let refused = |bytes: &[u8], word: &str| {
            let error = UniqueId::from_slice(bytes).unwrap_err();
            assert!(error.message().contains(word), "{error}");
        };
        refused(&[0; 128], "zeros");
        refused(&id.0[..127], "127");
        for at in 0..128 {
            let mut bytes = id.0;
            bytes[at] ^= 1;
            refused(&bytes, if at == 0 { "format 0" } else { "checksum" });
        }
        refused(&assemble(0, &[1; 32], &[2; 16], &[]).0, "address");
        assert!(UniqueId::from_hex("12zz").is_err());
    }

    #[test]
    fn address_beyond_loopback_needs_a_secret() {
        let mut config = Config {
            log_level: "none".into(),
            ..Config::default()
        };
        let local = UniqueId::for_address("127.0.0.1", 29501, &config).unwrap();
        assert!(local.rank_zero_opens());
        let far = |config: &Config| UniqueId::for_address("192.0.2.1", 29501, config);
        let error = far(&config).unwrap_err();
        assert!(error.message().contains("CINCH_SECRET_FILE"), "{error}");
        config.allow_unauthenticated = true;
        far(&config).unwrap();
        config.allow_unauthenticated = false;

        let path = std::env::temp_dir().join(format!("cinch-secret-{}", std::process::id()));
        std::fs::write(&path, [7; 32]).unwrap();
        config.secret_file = Some(path.clone());
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        let open = far(&config).unwrap_err();
        assert!(open.message().contains("mode 640"), "{open}");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let first = far(&config).unwrap();
        assert!(first == far(&config).unwrap());
        std::fs::write(&path, [8; 32]).unwrap();
        assert!(first.fingerprint() != far(&config).unwrap().fingerprint());
        std::fs::write(&path, [8; 3]).unwrap();
        assert!(far(&config).is_err());
        std::fs::remove_file(&path).unwrap();
        assert!(far(&config).is_err());
    }
}
