//! Ranks as the control plane knows and names them.

use super::wire::{Reader, Writer, damaged};
use super::{PeerInfo, process};
use crate::config::Config;
use crate::error::Result;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A rank, with what only the control plane needs to know of it.
#[derive(Clone, Debug)]
pub(super) struct RankEntry {
    pub(super) info: PeerInfo,
    /// See [`process::start_time`]; 0 if unknown.
    pub(super) start_time: u64,
    /// See [`process::pid_namespace`].
    pub(super) pid_namespace: u64,
    /// Port of its control listener; 0 if it has none.
    pub(super) control_port: u16,
}

impl RankEntry {
    /// This process as `rank`.
    pub(super) fn this(rank: usize, address: IpAddr, config: &Config) -> Result<RankEntry> {
        let pid = std::process::id();
        Ok(RankEntry {
            info: PeerInfo {
                rank,
                pid,
                uid: nix::unistd::getuid().as_raw(),
                host: process::host_name(),
                host_id: process::host_id(config),
                process_id: process::process_id()?,
                address,
            },
            start_time: process::start_time(pid).unwrap_or(0),
            pid_namespace: process::pid_namespace(),
            control_port: 0,
        })
    }

    pub(super) fn write(&self, writer: &mut Writer) {
        let info = &self.info;
        writer.u32(info.rank as u32).u32(info.pid).u32(info.uid);
        writer.text(&info.host);
        writer.bytes(&info.host_id).bytes(&info.process_id);
        match info.address {
            IpAddr::V4(v4) => writer.u8(4).bytes(&v4.octets()),
            IpAddr::V6(v6) => writer.u8(6).bytes(&v6.octets()),
        };
        writer.u64(self.start_time).u64(self.pid_namespace);
        writer.u16(self.control_port);
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<RankEntry> {
        Ok(RankEntry {
            info: PeerInfo {
                rank: reader.u32()? as usize,
                pid: reader.u32()?,
                uid: reader.u32()?,
                host: reader.text()?,
                host_id: reader.array()?,
                process_id: reader.array()?,
                address: match reader.u8()? {
                    4 => Ipv4Addr::from(reader.array::<4>()?).into(),
                    6 => Ipv6Addr::from(reader.array::<16>()?).into(),
                    _ => return Err(damaged()),
                },
            },
            start_time: reader.u64()?,
            pid_namespace: reader.u64()?,
            control_port: reader.u16()?,
        })
    }

    /// `(host b, pid 412)`.
    pub(super) fn place(&self) -> String {
        format!("(host {}, pid {})", self.info.host, self.info.pid)
    }
}

/// `rank 3`, `ranks 3, 5, 6 and 12 more`.
pub(super) fn name_ranks(ranks: &[usize]) -> String {
    const SHOWN: usize = 16;
    let shown: Vec<String> = ranks.iter().take(SHOWN).map(usize::to_string).collect();
    let plural = if ranks.len() == 1 { "" } else { "s" };
    let more = match ranks.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("rank{plural} {}{more}", shown.join(", "))
}
