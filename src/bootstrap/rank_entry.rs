//! A rank in the rendezvous table: its [`PeerInfo`], and further facts for the control plane.

use super::PeerInfo;
use super::process::{self, ProcessState};
use crate::config::Config;
use crate::error::Result;
use crate::wire::{Damaged, Reader, Wire, WireResult, Writer};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An entry of the rendezvous table.
#[derive(Clone, Debug)]
pub(super) struct RankEntry {
    pub(super) info: PeerInfo,
    /// Start time of the process, see [`process::start_time`]; 0 if unknown.
    pub(super) start_time: u64,
    /// Namespace of the pid, see [`process::pid_namespace`].
    pub(super) pid_namespace: u64,
    /// Port of the control listener; 0 on members.
    pub(super) control_port: u16,
}

impl RankEntry {
    /// Makes the table entry of this process, whose rank is `rank`.
    pub(super) fn this(rank: usize, address: IpAddr, config: &Config) -> Result<RankEntry> {
        let pid = std::process::id();
        Ok(RankEntry {
            info: PeerInfo {
                rank,
                pid,
                uid: nix::unistd::getuid().as_raw(),
                host: process::host_name(),
                host_id: process::host_id(config)?,
                process_id: process::process_id()?,
                address,
            },
            start_time: process::start_time(pid).unwrap_or(0),
            pid_namespace: process::pid_namespace(),
            control_port: 0,
        })
    }

    /// Names the process: `(host b, pid 412)`.
    pub(super) fn place(&self) -> String {
        format!("(host {}, pid {})", self.info.host, self.info.pid)
    }

    /// Looks up the process of `other`, as far as this process can see it.
    pub(super) fn state_of(&self, other: &RankEntry) -> ProcessState {
        if self.shares_process(other) || !self.sees(other) {
            return ProcessState::Running;
        }
        process::state(other.info.pid, other.start_time)
    }

    pub(super) fn shares_process(&self, other: &RankEntry) -> bool {
        other.info.process_id == self.info.process_id
    }

    /// Returns whether /proc shows the process of `other` here.
    pub(super) fn sees(&self, other: &RankEntry) -> bool {
        other.info.host_id == self.info.host_id
            && other.pid_namespace == self.pid_namespace
            && other.start_time != 0
    }
}

impl Wire for RankEntry {
    fn write(&self, writer: &mut Writer) {
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

    fn read(reader: &mut Reader<'_>) -> WireResult<RankEntry> {
        Ok(RankEntry {
            info: PeerInfo {
                rank: reader.u32()? as usize,
                pid: reader.u32()?,
                uid: reader.u32()?,
                host: reader.text()?,
                host_id: reader.take()?,
                process_id: reader.take()?,
                address: match reader.u8()? {
                    4 => Ipv4Addr::from(reader.take::<[u8; 4]>()?).into(),
                    6 => Ipv6Addr::from(reader.take::<[u8; 16]>()?).into(),
                    _ => return Err(Damaged),
                },
            },
            start_time: reader.u64()?,
            pid_namespace: reader.u64()?,
            control_port: reader.u16()?,
        })
    }
}

/// Names ranks: `rank 3`, `ranks 3, 5, 6 and 12 more`.
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
