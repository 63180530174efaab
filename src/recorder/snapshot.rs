//! Snapshots: what the ranks of a process report about themselves to another process of their job.

use super::{CommLabel, EndStep, FlightRecorder, GpuNumbers, RankName, WaitRecord};
use crate::error::Error;
use crate::wire::{Damaged, Reader, Wire, WireResult, Writer};

/// Version of the format. A process does not read the snapshots of another version.
const SNAPSHOT_VERSION: u8 = 1;

/// State of a rank of a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSnapshot {
    /// The communicator, with this rank's number.
    pub label: CommLabel,
    /// Number of calls of each collective, by the collective's number.
    pub counts: Vec<u64>,
    /// Whether the rank makes no more calls.
    pub is_closing: bool,
    /// Whether the program has given up its handle.
    pub is_destroyed: bool,
    /// Whether the rank has aborted the communicator.
    pub is_aborted: bool,
    /// Why the communicator fails on this rank.
    pub error: Option<Error>,
    /// Messages that the rank waits for.
    pub waits: Option<WaitRecord>,
}

impl RankSnapshot {
    /// Reads a recorder.
    pub fn of(recorder: &FlightRecorder) -> RankSnapshot {
        RankSnapshot {
            label: recorder.label().clone(),
            counts: recorder.collective_counts(),
            is_closing: recorder.has_ended(EndStep::Closing),
            is_destroyed: recorder.has_ended(EndStep::Destroyed),
            is_aborted: recorder.has_ended(EndStep::Aborted),
            error: recorder.error(),
            waits: recorder.waits(),
        }
    }
}

/// States of all ranks of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSnapshot {
    /// Name of the process's host.
    pub host: String,
    /// Id of the process.
    pub pid: u32,
    /// Address of the text service. Processes with other addresses belong to other jobs.
    pub service: String,
    /// The ranks, in the order in which they joined.
    pub ranks: Vec<RankSnapshot>,
}

/// Appends the number of items, and the items.
fn write_list<T: Wire>(writer: &mut Writer, items: &[T]) {
    writer.u32(items.len() as u32);
    items.iter().for_each(|item| item.write(writer));
}

/// Reads a list. Allocates no more than the message carries.
fn read_list<T: Wire>(reader: &mut Reader<'_>) -> WireResult<Vec<T>> {
    let count = reader.u32()?;
    let mut items = Vec::new();
    for _ in 0..count {
        items.push(reader.take()?);
    }
    Ok(items)
}

impl Wire for RankName {
    fn write(&self, writer: &mut Writer) {
        writer.text(&self.text).text(&self.host).u32(self.pid);
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<RankName> {
        Ok(RankName {
            text: reader.text()?,
            host: reader.text()?,
            pid: reader.u32()?,
        })
    }
}

impl Wire for GpuNumbers {
    fn write(&self, writer: &mut Writer) {
        writer.u32(self.cuda).put(&self.nvml);
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<GpuNumbers> {
        Ok(GpuNumbers {
            cuda: reader.u32()?,
            nvml: reader.take()?,
        })
    }
}

impl Wire for CommLabel {
    fn write(&self, writer: &mut Writer) {
        writer
            .text(&self.name)
            .put(&self.id)
            .u32(self.rank as u32)
            .put(&self.gpu);
        write_list(writer, &self.ranks);
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<CommLabel> {
        let label = CommLabel {
            name: reader.text()?,
            id: reader.take()?,
            rank: reader.u32()? as usize,
            gpu: reader.take()?,
            ranks: read_list(reader)?,
        };
        match label.rank < label.ranks.len() {
            true => Ok(label),
            false => Err(Damaged),
        }
    }
}

impl Wire for WaitRecord {
    fn write(&self, writer: &mut Writer) {
        writer.u64(self.since).u32(self.missing.len() as u32);
        for (rank, what) in &self.missing {
            writer.u32(*rank as u32).text(what);
        }
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<WaitRecord> {
        let since = reader.u64()?;
        let mut missing = Vec::new();
        for _ in 0..reader.u32()? {
            missing.push((reader.u32()? as usize, reader.text()?));
        }
        Ok(WaitRecord { missing, since })
    }
}

impl Wire for RankSnapshot {
    fn write(&self, writer: &mut Writer) {
        writer
            .put(&self.label)
            .put(&self.is_closing)
            .put(&self.is_destroyed)
            .put(&self.is_aborted)
            .put(&self.error)
            .put(&self.waits);
        write_list(writer, &self.counts);
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<RankSnapshot> {
        Ok(RankSnapshot {
            label: reader.take()?,
            is_closing: reader.take()?,
            is_destroyed: reader.take()?,
            is_aborted: reader.take()?,
            error: reader.take()?,
            waits: reader.take()?,
            counts: read_list(reader)?,
        })
    }
}

impl Wire for ProcessSnapshot {
    fn write(&self, writer: &mut Writer) {
        writer
            .u8(SNAPSHOT_VERSION)
            .text(&self.host)
            .u32(self.pid)
            .text(&self.service);
        write_list(writer, &self.ranks);
    }

    fn read(reader: &mut Reader<'_>) -> WireResult<ProcessSnapshot> {
        if reader.u8()? != SNAPSHOT_VERSION {
            return Err(Damaged);
        }
        Ok(ProcessSnapshot {
            host: reader.text()?,
            pid: reader.u32()?,
            service: reader.text()?,
            ranks: read_list(reader)?,
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::error::ErrorKind;

    /// Returns the snapshot of rank `rank` of `nranks` ranks, all of host `a`, with process ids from 100.
    pub(in super::super) fn rank_snapshot(id: u8, rank: usize, nranks: usize) -> RankSnapshot {
        let name = |rank: usize| RankName {
            text: format!("rank {rank} (host a, pid {})", 100 + rank),
            host: "a".into(),
            pid: 100 + rank as u32,
        };
        RankSnapshot {
            label: CommLabel {
                name: "tp".into(),
                id: [id; 8],
                rank,
                ranks: (0..nranks).map(name).collect(),
                gpu: Some(GpuNumbers {
                    cuda: 1,
                    nvml: Some(3),
                }),
            },
            counts: vec![7, 0, 1],
            is_closing: false,
            is_destroyed: true,
            is_aborted: false,
            error: Some(Error::new(ErrorKind::Remote, "rank 1 died")),
            waits: Some(WaitRecord {
                missing: vec![(1, "a message".into())],
                since: 5,
            }),
        }
    }

    #[test]
    fn snapshots_are_read_as_written_and_damaged_ones_refused() {
        let snapshot = ProcessSnapshot {
            host: "a".into(),
            pid: 100,
            service: "localhost:28028".into(),
            ranks: vec![rank_snapshot(1, 0, 2), rank_snapshot(2, 1, 3)],
        };
        let bytes = snapshot.to_bytes();
        assert_eq!(ProcessSnapshot::from_bytes(&bytes), Ok(snapshot));
        for end in 0..bytes.len() {
            assert!(ProcessSnapshot::from_bytes(&bytes[..end]).is_err());
        }
        // A length that the message does not carry allocates nothing.
        let mut long = bytes.clone();
        let at = 1 + 2 + 1 + 4 + 2 + "localhost:28028".len();
        long[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(ProcessSnapshot::from_bytes(&long).is_err());
    }
}
