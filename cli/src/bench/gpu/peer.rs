//! The library to compare with.

use super::nccl::{Nccl, NcclComm, NcclId, WINDOW_SYMMETRIC};
use crate::bench::row::Row;
use cinch::gpu::{Context, DeviceMemory, Stream};
use cinch::{Collective, DType, Error, ErrorKind, ReduceOp, Result};
use std::ffi::c_int;
use std::path::Path;
use std::sync::Arc;

/// The setting that turns NVLink multicast off.
const NVLS: &str = "NCCL_NVLS_ENABLE";

/// Opens the library, and keeps it from using NVLink multicast unless the caller has said
/// otherwise: cinch does without, and not every machine may. What to print comes with it.
///
/// To be called before the process has threads.
///
/// # Errors
/// Those of opening it.
pub fn open(path: &Path) -> Result<(Arc<Nccl>, Vec<String>)> {
    let note = match std::env::var(NVLS).as_deref() {
        Ok("0") => None,
        Ok(value) => Some(format!(
            "warning: {NVLS}={value}: NCCL may use NVLink multicast, which cinch does not"
        )),
        Err(_) => {
            // SAFETY: no other thread exists that could read the environment meanwhile.
            unsafe { std::env::set_var(NVLS, "0") };
            Some(format!("{NVLS}=0 was set for NCCL: no NVLink multicast"))
        }
    };
    let nccl = Arc::new(Nccl::open(path)?);
    let notes = [Some(format!("against {nccl:?}")), note];
    Ok((nccl, notes.into_iter().flatten().collect()))
}

/// Has the driver give each stream of a process a queue of its own, where that can matter: kernels
/// of ranks on one GPU wait for each other, and for ever if they share a queue.
///
/// To be called before the process has threads, or a context.
pub fn separate_queues() {
    const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(QUEUES).is_none() {
        // SAFETY: as above.
        unsafe { std::env::set_var(QUEUES, "32") };
    }
}

/// Returns a new id for the ranks of the other library.
///
/// # Errors
/// Those of the library.
pub fn unique_id(nccl: &Nccl) -> Result<[u8; 128]> {
    let mut id = NcclId([0; 128]);
    // SAFETY: writes one id.
    let result = unsafe { (nccl.functions().unique_id)(&mut id) };
    nccl.check("ncclGetUniqueId", result)?;
    Ok(id.0)
}

/// A communicator of the other library.
pub struct PeerComm {
    nccl: Arc<Nccl>,
    context: Arc<Context>,
    comm: NcclComm,
    rank: usize,
    nranks: usize,
    windows: Option<Windows>,
}

/// Buffers in symmetric windows.
struct Windows {
    /// For inputs, and for outputs.
    buffers: Vec<DeviceMemory>,
    handles: Vec<usize>,
}

impl PeerComm {
    /// Joins as `rank` on the GPU of `context`. All ranks call it together.
    ///
    /// # Errors
    /// Those of the library.
    pub fn join(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        id: [u8; 128],
        rank: usize,
        nranks: usize,
    ) -> Result<PeerComm> {
        let _bound = context.bind()?;
        let mut comm = NcclComm(0);
        // SAFETY: writes one handle; the GPU's context is current.
        let result = unsafe {
            (nccl.functions().init_rank)(&mut comm, nranks as c_int, NcclId(id), rank as c_int)
        };
        nccl.check("ncclCommInitRank", result)?;
        Ok(PeerComm {
            nccl: nccl.clone(),
            context: context.clone(),
            comm,
            rank,
            nranks,
            windows: None,
        })
    }

    /// Allocates buffers of these bytes for symmetric windows. If it fails on a rank, all call
    /// [`PeerComm::close_windows`], and none goes on: to register them is a collective.
    ///
    /// # Errors
    /// Unsupported if the library has no windows; those of the library.
    pub fn allocate_windows(&mut self, bytes: (usize, usize)) -> Result<()> {
        let functions = *self.nccl.windows()?;
        let _bound = self.context.bind()?;
        let windows = self.windows.insert(Windows {
            buffers: Vec::new(),
            handles: Vec::new(),
        });
        for bytes in [bytes.0, bytes.1] {
            let mut address = 0;
            // SAFETY: writes one address; the GPU's context is current.
            let result = unsafe { (functions.mem_alloc)(&mut address, bytes) };
            self.nccl.check("ncclMemAlloc", result)?;
            // SAFETY: just allocated, and freed by `close_windows`, which drops the value first.
            let memory = unsafe { DeviceMemory::lent(&self.context, address, bytes) };
            windows.buffers.push(memory);
        }
        Ok(())
    }

    /// Registers the buffers as symmetric windows. All ranks call it together, and all call
    /// [`PeerComm::close_windows`] if it fails on one of them.
    ///
    /// # Errors
    /// Unsupported if the GPUs have no windows; those of the library.
    pub fn register_windows(&mut self) -> Result<()> {
        let functions = *self.nccl.windows()?;
        let _bound = self.context.bind()?;
        let Some(windows) = &mut self.windows else {
            return Err(Error::internal("there are no buffers for windows"));
        };
        for memory in &windows.buffers {
            let (mut window, address) = (0, memory.address());
            // SAFETY: memory of the library's own allocator; writes one handle; the communicator
            // lives.
            let result = unsafe {
                let bytes = memory.bytes();
                (functions.register)(self.comm, address, bytes, &mut window, WINDOW_SYMMETRIC)
            };
            self.nccl.check("ncclCommWindowRegister", result)?;
            if window == 0 {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!(
                        "{:?} registers no symmetric windows on these GPUs",
                        self.nccl
                    ),
                ));
            }
            windows.handles.push(window);
        }
        Ok(())
    }

    /// Returns the inputs and outputs in symmetric windows, where there are any.
    pub fn windows(&self) -> Option<(&DeviceMemory, &DeviceMemory)> {
        match self.windows.as_ref()?.buffers.as_slice() {
            [inputs, outputs] => Some((inputs, outputs)),
            _ => None,
        }
    }

    /// Returns whether it has a row's call with kernels of its own for symmetric windows.
    pub fn has_symmetric(&self, row: &Row) -> bool {
        let symmetric = [
            Collective::AllReduce,
            Collective::AllGather,
            Collective::ReduceScatter,
        ];
        self.windows.is_some() && self.has(row) && symmetric.contains(&row.collective)
    }

    /// Deregisters the windows, if there are any.
    ///
    /// # Errors
    /// Those of the library.
    pub fn close_windows(&mut self) -> Result<()> {
        let Some(windows) = self.windows.take() else {
            return Ok(());
        };
        let functions = *self.nccl.windows()?;
        let _bound = self.context.bind()?;
        let mut closed = Ok(());
        for window in windows.handles {
            // SAFETY: registered once, and not used any more.
            let result = unsafe { (functions.deregister)(self.comm, window) };
            closed = closed.and(self.nccl.check("ncclCommWindowDeregister", result));
        }
        for memory in windows.buffers {
            let address = memory.address();
            drop(memory);
            // SAFETY: allocated by `allocate_windows`; nothing uses it any more.
            let result = unsafe { (functions.mem_free)(address) };
            closed = closed.and(self.nccl.check("ncclMemFree", result));
        }
        closed
    }

    /// Returns whether it has a row's call.
    pub fn has(&self, row: &Row) -> bool {
        let reduces = [
            Collective::AllReduce,
            Collective::ReduceScatter,
            Collective::Reduce,
        ];
        !row.collective.reduces() || reduces.contains(&row.collective) && operator(row.op).is_some()
    }

    /// Queues a row's call, without a codec.
    ///
    /// # Errors
    /// Those of the library.
    ///
    /// # Safety
    /// The addresses are of buffers of the row's sizes on this rank's GPU, which live, and which
    /// nobody else uses, until the stream is past the call, or until no graph replays it.
    pub unsafe fn queue(&self, row: &Row, input: u64, output: u64, stream: &Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        let f = self.nccl.functions();
        let (count, dtype, comm) = (row.count, datatype(row.dtype), self.comm);
        let (op, root) = (operator(row.op).unwrap_or(0), row.root as c_int);
        let queue = stream.handle().0;
        // SAFETY: by the caller's word; the communicator lives.
        let result = unsafe {
            match row.collective {
                Collective::AllReduce => {
                    (f.all_reduce)(input, output, count, dtype, op, comm, queue)
                }
                Collective::AllGather => (f.all_gather)(input, output, count, dtype, comm, queue),
                Collective::ReduceScatter => {
                    (f.reduce_scatter)(input, output, count, dtype, op, comm, queue)
                }
                Collective::Broadcast => {
                    (f.broadcast)(input, output, count, dtype, root, comm, queue)
                }
                Collective::Reduce => {
                    (f.reduce)(input, output, count, dtype, op, root, comm, queue)
                }
                _ => return self.messages(row, input, output, queue),
            }
        };
        self.nccl.check(row.collective.name(), result)
    }

    /// Queues the collectives that NCCL composes of sends and receives.
    unsafe fn messages(&self, row: &Row, input: u64, output: u64, queue: usize) -> Result<()> {
        let f = self.nccl.functions();
        let (count, dtype) = (row.count, datatype(row.dtype));
        let (me, n) = (self.rank, self.nranks);
        let bytes = (count * row.dtype.size()) as u64;
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        match row.collective {
            Collective::SendRecv => {
                sends.push(((me + 1) % n, 0));
                receives.push(((me + n - 1) % n, 0));
            }
            Collective::Gather => {
                sends.push((row.root, 0));
                receives.extend((0..n).filter(|_| me == row.root).map(|r| (r, r as u64)));
            }
            Collective::Scatter => {
                sends.extend((0..n).filter(|_| me == row.root).map(|r| (r, r as u64)));
                receives.push((row.root, 0));
            }
            _ => {
                sends.extend((0..n).map(|r| (r, r as u64)));
                receives.extend((0..n).map(|r| (r, r as u64)));
            }
        }
        // SAFETY: no arguments.
        let started = unsafe { (f.group_start)() };
        self.nccl.check("ncclGroupStart", started)?;
        let mut queued = Ok(());
        for (peer, block) in sends {
            let at = input + block * bytes;
            // SAFETY: blocks of the buffers, by the caller's word.
            let result = unsafe { (f.send)(at, count, dtype, peer as c_int, self.comm, queue) };
            queued = queued.and(self.nccl.check("ncclSend", result));
        }
        for (peer, block) in receives {
            let at = output + block * bytes;
            // SAFETY: as above.
            let result = unsafe { (f.recv)(at, count, dtype, peer as c_int, self.comm, queue) };
            queued = queued.and(self.nccl.check("ncclRecv", result));
        }
        // SAFETY: no arguments; a group that was started is ended, whatever went wrong in it.
        let ended = unsafe { (f.group_end)() };
        queued.and(self.nccl.check("ncclGroupEnd", ended))
    }

    /// Destroys the communicator. All ranks call it together, when nothing is queued any more.
    ///
    /// # Errors
    /// Those of the library.
    pub fn destroy(mut self) -> Result<()> {
        self.close_windows()?;
        let _bound = self.context.bind()?;
        // SAFETY: joined once, destroyed once: `self` ends here.
        let result = unsafe { (self.nccl.functions().destroy)(self.comm) };
        self.nccl.check("ncclCommDestroy", result)
    }
}

/// `ncclDataType_t`.
fn datatype(dtype: DType) -> c_int {
    match dtype {
        DType::I8 => 0,
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        DType::F8E4M3 => 10,
        DType::F8E5M2 => 11,
    }
}

/// `ncclRedOp_t`, of the built-in ones.
fn operator(op: ReduceOp) -> Option<c_int> {
    match op {
        ReduceOp::Sum => Some(0),
        ReduceOp::Prod => Some(1),
        ReduceOp::Max => Some(2),
        ReduceOp::Min => Some(3),
        ReduceOp::Avg => Some(4),
        ReduceOp::PreMulSum(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_types_have_one_number() {
        let mut numbers: Vec<c_int> = DType::ALL.into_iter().map(datatype).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..DType::ALL.len() as c_int).collect::<Vec<_>>());
    }
}
