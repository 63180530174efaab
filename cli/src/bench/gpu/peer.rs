//! Runs the calls of a benchmark row on the NCCL library that is compared with cinch.

use super::nccl::{Nccl, NcclComm, NcclId, WINDOW_SYMMETRIC};
use crate::bench::row::Row;
use cinch::gpu::{Context, DeviceMemory, Stream};
use cinch::{Collective, DType, Error, ErrorKind, ReduceOp, Result};
use std::ffi::c_int;
use std::path::Path;
use std::sync::Arc;

/// NCCL's environment variable that controls NVLink multicast (NVLS).
const NVLS: &str = "NCCL_NVLS_ENABLE";

/// Opens the library and returns it with lines to print. Turns NVLink multicast off unless the
/// environment has set it: cinch uses none, and some machines forbid it.
///
/// Must be called before the process starts threads, as it sets an environment variable.
///
/// # Errors
/// Returns an error if the library cannot be opened.
pub fn open(path: &Path) -> Result<(Arc<Nccl>, Vec<String>)> {
    let note = match std::env::var(NVLS).as_deref() {
        Ok("0") => None,
        Ok(value) => Some(format!(
            "warning: {NVLS}={value}: NCCL may use NVLink multicast, which cinch does not"
        )),
        Err(_) => {
            // SAFETY: the caller calls before any other thread exists that could read the
            // environment.
            unsafe { std::env::set_var(NVLS, "0") };
            Some(format!("{NVLS}=0 was set for NCCL: no NVLink multicast"))
        }
    };
    let nccl = Arc::new(Nccl::open(path)?);
    let notes = [Some(format!("against {nccl:?}")), note];
    Ok((nccl, notes.into_iter().flatten().collect()))
}

/// Makes the driver give each stream of the process a hardware queue of its own. Kernels of ranks
/// on one GPU wait for each other, and would deadlock in one queue.
///
/// Must be called before the process starts threads or creates a CUDA context.
pub fn separate_queues() {
    const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(QUEUES).is_none() {
        // SAFETY: the caller calls before any other thread exists that could read the environment.
        unsafe { std::env::set_var(QUEUES, "32") };
    }
}

/// Creates a unique id for an NCCL communicator.
///
/// # Errors
/// Returns NCCL's errors.
pub fn unique_id(nccl: &Nccl) -> Result<[u8; 128]> {
    let mut id = NcclId([0; 128]);
    // SAFETY: `id` is a local that outlives the call, and `ncclGetUniqueId` writes only this id.
    let result = unsafe { (nccl.functions().unique_id)(&mut id) };
    nccl.check("ncclGetUniqueId", result)?;
    Ok(id.0)
}

/// An NCCL communicator, for comparison with cinch.
pub struct PeerComm {
    nccl: Arc<Nccl>,
    context: Arc<Context>,
    comm: NcclComm,
    rank: usize,
    nranks: usize,
    windows: Option<Windows>,
}

/// NCCL buffers that are registered as symmetric windows.
struct Windows {
    /// The input arena, then the output arena.
    buffers: Vec<DeviceMemory>,
    handles: Vec<usize>,
}

impl PeerComm {
    /// Joins an NCCL communicator as `rank` on the GPU of `context`. All ranks must call it
    /// together.
    ///
    /// # Errors
    /// Returns NCCL's errors.
    pub fn join(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        id: [u8; 128],
        rank: usize,
        nranks: usize,
    ) -> Result<PeerComm> {
        let _bound = context.bind()?;
        let mut comm = NcclComm(0);
        // SAFETY: `comm` is a local that outlives the call, which writes only this handle. `_bound`
        // keeps the GPU's context current.
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

    /// Allocates buffers of `bytes` (inputs, outputs) for symmetric windows. If it fails on any
    /// rank, all ranks must call [`PeerComm::close_windows`], as registration is collective.
    ///
    /// # Errors
    /// Returns an unsupported error if the library has no windows; returns NCCL's errors.
    pub fn allocate_windows(&mut self, bytes: (usize, usize)) -> Result<()> {
        let functions = *self.nccl.windows()?;
        let _bound = self.context.bind()?;
        let windows = self.windows.insert(Windows {
            buffers: Vec::new(),
            handles: Vec::new(),
        });
        for bytes in [bytes.0, bytes.1] {
            let mut address = 0;
            // SAFETY: `address` is a local that outlives the call, which writes only this address.
            // The GPU's context is current.
            let result = unsafe { (functions.mem_alloc)(&mut address, bytes) };
            self.nccl.check("ncclMemAlloc", result)?;
            // SAFETY: NCCL has just allocated the memory. `close_windows` drops this value before
            // it frees the memory.
            let memory = unsafe { DeviceMemory::lent(&self.context, address, bytes) };
            windows.buffers.push(memory);
        }
        Ok(())
    }

    /// Registers the buffers as symmetric windows. All ranks must call it together. If it fails on
    /// any rank, all ranks must call [`PeerComm::close_windows`].
    ///
    /// # Errors
    /// Returns an unsupported error if the GPUs support no windows; returns NCCL's errors.
    pub fn register_windows(&mut self) -> Result<()> {
        let functions = *self.nccl.windows()?;
        let _bound = self.context.bind()?;
        let Some(windows) = &mut self.windows else {
            return Err(Error::internal("there are no buffers for windows"));
        };
        for memory in &windows.buffers {
            let (mut window, address) = (0, memory.address());
            // SAFETY: NCCL's allocator made the memory, `self` keeps the communicator open, and the
            // call writes one handle.
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

    /// Returns the input and output arenas in symmetric windows, if windows are open.
    pub fn windows(&self) -> Option<(&DeviceMemory, &DeviceMemory)> {
        match self.windows.as_ref()?.buffers.as_slice() {
            [inputs, outputs] => Some((inputs, outputs)),
            _ => None,
        }
    }

    /// Returns whether NCCL has a kernel for the row's call on symmetric windows.
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
    /// Returns NCCL's errors.
    pub fn close_windows(&mut self) -> Result<()> {
        let Some(windows) = self.windows.take() else {
            return Ok(());
        };
        let functions = *self.nccl.windows()?;
        let _bound = self.context.bind()?;
        let mut closed = Ok(());
        for window in windows.handles {
            // SAFETY: `register_windows` registered the window once, and no queued call uses it any
            // more.
            let result = unsafe { (functions.deregister)(self.comm, window) };
            closed = closed.and(self.nccl.check("ncclCommWindowDeregister", result));
        }
        for memory in windows.buffers {
            let address = memory.address();
            drop(memory);
            // SAFETY: `allocate_windows` allocated the memory, and no queued call uses it any more.
            let result = unsafe { (functions.mem_free)(address) };
            closed = closed.and(self.nccl.check("ncclMemFree", result));
        }
        closed
    }

    /// Returns whether NCCL can run the row's call.
    pub fn has(&self, row: &Row) -> bool {
        let reduces = [
            Collective::AllReduce,
            Collective::ReduceScatter,
            Collective::Reduce,
        ];
        row.dtype.nccl_number().is_some()
            && (!row.collective.reduces()
                || reduces.contains(&row.collective) && operator(row.op).is_some())
    }

    /// Queues a row's call on NCCL, without compression.
    ///
    /// # Errors
    /// Returns NCCL's errors.
    ///
    /// # Safety
    /// The addresses are buffers of the row's sizes on this rank's GPU. They stay allocated and
    /// unused by others until the stream has finished the call, or until no graph replays it.
    pub unsafe fn queue(&self, row: &Row, input: u64, output: u64, stream: &Stream) -> Result<()> {
        let _bound = self.context.bind()?;
        let f = self.nccl.functions();
        let (count, dtype, comm) = (row.count, datatype(row.dtype)?, self.comm);
        let (op, root) = (operator(row.op).unwrap_or(0), row.root as c_int);
        let queue = stream.handle().addr();
        // SAFETY: the caller keeps the buffers, and `self` keeps the communicator open.
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

    /// Queues a collective that NCCL lacks, as a group of sends and receives.
    unsafe fn messages(&self, row: &Row, input: u64, output: u64, queue: usize) -> Result<()> {
        let f = self.nccl.functions();
        let (count, dtype) = (row.count, datatype(row.dtype)?);
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
        // SAFETY: `ncclGroupStart` has no preconditions.
        let started = unsafe { (f.group_start)() };
        self.nccl.check("ncclGroupStart", started)?;
        let mut queued = Ok(());
        for (peer, block) in sends {
            let at = input + block * bytes;
            // SAFETY: the block lies in a buffer that the caller keeps; `self` keeps the
            // communicator open.
            let result = unsafe { (f.send)(at, count, dtype, peer as c_int, self.comm, queue) };
            queued = queued.and(self.nccl.check("ncclSend", result));
        }
        for (peer, block) in receives {
            let at = output + block * bytes;
            // SAFETY: the block lies in a buffer that the caller keeps; `self` keeps the
            // communicator open.
            let result = unsafe { (f.recv)(at, count, dtype, peer as c_int, self.comm, queue) };
            queued = queued.and(self.nccl.check("ncclRecv", result));
        }
        // SAFETY: `started` shows that a group is open; it is closed even if a call in it has
        // failed.
        let ended = unsafe { (f.group_end)() };
        queued.and(self.nccl.check("ncclGroupEnd", ended))
    }

    /// Destroys the NCCL communicator. All ranks must call it together, after all queued calls have
    /// finished.
    ///
    /// # Errors
    /// Returns NCCL's errors.
    pub fn destroy(mut self) -> Result<()> {
        self.close_windows()?;
        let _bound = self.context.bind()?;
        // SAFETY: `join` created the communicator, and taking `self` by value destroys it only
        // once.
        let result = unsafe { (self.nccl.functions().destroy)(self.comm) };
        self.nccl.check("ncclCommDestroy", result)
    }
}

/// Returns the `ncclDataType_t` of an element type.
fn datatype(dtype: DType) -> Result<c_int> {
    let number = dtype.nccl_number();
    number.map(c_int::from).ok_or_else(|| {
        Error::new(
            ErrorKind::Unsupported,
            format!("NCCL has no type {dtype}; compare another"),
        )
    })
}

/// Returns the `ncclRedOp_t` of a built-in reduction, or `None`.
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
