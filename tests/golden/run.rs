//! Runs batches of cases as one rank and hashes its outputs.

use super::abi::{self, CCall, CConfig, CReport, Code, Comm};
use super::cases::{ALL_REDUCE, Batch, Call, Op, SEND_RECV, Settings, Step};
use super::data::{Hash, Inputs, factor};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Time that a rank waits for other ranks before it fails.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The result of a case on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Hash of the codes of all calls, and of the outputs of calls that succeeded.
    pub hash: Hash,
    /// First code other than success.
    pub error: Option<Code>,
}

/// Outcomes of one rank by case name.
pub type Outcomes = BTreeMap<String, Outcome>;

/// Placement of a call's buffers, which must not change results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Input and output are separate.
    Apart,
    /// Input and output are separate and begin one byte off their alignment.
    Unaligned,
    /// Input and output share memory, for collectives that allow it.
    InPlace,
}

/// A rank of a communicator.
#[derive(Clone, Debug)]
pub struct Rank {
    pub rank: usize,
    pub nranks: usize,
    /// Transport between the ranks, as its number in `cinch_transport_t`.
    pub transport: u32,
    pub placement: Placement,
    /// Folder into which rank 0 writes the unique ids of communicators for the other ranks.
    pub ids: PathBuf,
    /// Prefix of all case names.
    pub prefix: String,
}

impl Rank {
    /// Runs all batches. Every rank calls this in its own thread with equal batches.
    pub fn run(&self, batches: &[Batch]) -> Outcomes {
        let mut state = State {
            rank: self,
            inputs: Inputs::new(self.rank),
            outcomes: Outcomes::new(),
        };
        let mut comm: Option<(Settings, Comm)> = None;
        for (at, batch) in batches.iter().enumerate() {
            if comm
                .as_ref()
                .is_none_or(|(settings, _)| *settings != batch.settings)
            {
                if let Some((_, comm)) = comm.take() {
                    comm.close();
                }
                comm = Some((batch.settings, self.join(at, &batch.settings)));
            }
            let own = comm.as_ref().unwrap().1.split(0, self.rank as i64);
            state.run(&own, batch);
            own.close();
        }
        if let Some((_, comm)) = comm {
            comm.close();
        }
        state.outcomes
    }

    fn join(&self, number: usize, settings: &Settings) -> Comm {
        let codec = settings.codec.map(|codec| CString::new(codec).unwrap());
        let config = CConfig {
            codec: abi::pointer(&codec),
            codec_min_bytes: settings.codec_min_bytes,
            network_interface: c"lo".as_ptr(),
            transport: self.transport,
            algorithm: settings.algorithm,
            slots: settings.slots,
            channels: settings.channels,
            tcp_sockets: settings.tcp_sockets,
            slot_bytes: settings.slot_bytes,
            timeout_ms: TIMEOUT.as_millis() as u64,
            ..CConfig::new()
        };
        let id = self.id(number);
        Comm::init(&id, self.rank, self.nranks, &config).unwrap_or_else(|code| {
            panic!("{} cannot join: {code}: {}", self.prefix, abi::last_error())
        })
    }

    /// Returns the unique id of communicator `number`. Rank 0 creates it and the other ranks wait
    /// for its file.
    fn id(&self, number: usize) -> abi::UniqueId {
        let path = self.ids.join(format!("{}-{number}.id", self.prefix));
        if self.rank == 0 {
            let id = abi::unique_id();
            let unfinished = path.with_extension("part");
            fs::write(&unfinished, id.0).unwrap();
            fs::rename(unfinished, path).unwrap();
            return id;
        }
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Ok(bytes) = fs::read(&path) {
                return abi::UniqueId(bytes.try_into().unwrap());
            }
            assert!(
                Instant::now() < deadline,
                "rank 0 left no {}",
                path.display()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

struct State<'a> {
    rank: &'a Rank,
    inputs: Inputs,
    outcomes: Outcomes,
}

/// A call with the memory that its pointers refer to.
struct Prepared {
    call: CCall,
    /// Memory of the output, and of the input if the call is in place.
    memory: Vec<u8>,
    output: std::ops::Range<usize>,
    codec: Option<CString>,
    input: Vec<u8>,
    report: Box<CReport>,
    /// Operator that was created for the call.
    op: Option<u32>,
}

impl State<'_> {
    fn run(&mut self, comm: &Comm, batch: &Batch) {
        let mut reports = Hash::NEW;
        for case in &batch.cases {
            let name = format!("{}/{}/{}", self.rank.prefix, batch.name, case.name);
            let mut outcome = Outcome {
                hash: Hash::NEW,
                error: None,
            };
            for step in &case.steps {
                let code = self.step(comm, step, &mut outcome.hash, &mut reports);
                let refused = [abi::INVALID_ARGUMENT, abi::INVALID_USAGE, abi::UNSUPPORTED];
                assert!(
                    code == 0 || refused.contains(&code),
                    "{name}, rank {}: code {code}: {}",
                    self.rank.rank,
                    abi::last_error()
                );
                outcome.hash.word(code.into());
                outcome.error = outcome.error.or((code != 0).then_some(code));
            }
            self.insert(name, outcome);
        }
        let reports = Outcome {
            hash: reports,
            error: None,
        };
        self.insert(
            format!("{}/{}/reports", self.rank.prefix, batch.name),
            reports,
        );
    }

    fn insert(&mut self, name: String, outcome: Outcome) {
        assert!(!name.contains(' '), "{name}");
        let before = self.outcomes.insert(name.clone(), outcome);
        assert!(before.is_none(), "two cases have the name {name}");
    }

    fn step(&mut self, comm: &Comm, step: &Step, hash: &mut Hash, reports: &mut Hash) -> Code {
        let nranks = self.rank.nranks;
        match step {
            Step::Call(call) => self.calls(comm, (self.rank.rank, nranks), &[*call], hash, reports),
            Step::Group(calls) => self.calls(comm, (self.rank.rank, nranks), calls, hash, reports),
            Step::Function(call) => self.function(comm, call, hash),
            Step::Broken(call, change) => {
                let mut prepared = self.prepare(comm, (self.rank.rank, nranks), call);
                change(&mut prepared[0].call);
                let Prepared { call, report, .. } = &mut prepared[0];
                // SAFETY: the buffers and the report are in `prepared`. The library refuses the
                // changed call before it uses any of them.
                unsafe { abi::call(call, report) }
            }
            Step::Split(call) => {
                let (color, rank) = (self.rank.rank % 2, self.rank.rank);
                let half = comm.split(color, -(rank as i64));
                let members: Vec<_> = (0..nranks).rev().filter(|rank| rank % 2 == color).collect();
                let own = members.iter().position(|&member| member == rank).unwrap();
                let code = self.calls(&half, (own, members.len()), &[*call], hash, reports);
                half.close();
                code
            }
            Step::Rescale(factor) => comm.rescale_feedback(*factor),
            Step::Transfer => {
                let (code, residuals) = comm.export_feedback();
                if code != 0 {
                    return code;
                }
                abi::succeed("cinch_feedback_forget", comm.forget_feedback(0));
                comm.import_feedback(&residuals)
            }
            Step::Forget(tensor) => comm.forget_feedback(*tensor),
        }
    }

    /// Runs one call, or several as a group, as `rank` of `nranks`.
    fn calls(
        &mut self,
        comm: &Comm,
        (rank, nranks): (usize, usize),
        calls: &[Call],
        hash: &mut Hash,
        reports: &mut Hash,
    ) -> Code {
        let mut all: Vec<_> = calls
            .iter()
            .flat_map(|call| self.prepare(comm, (rank, nranks), call))
            .collect();
        let code = match &mut all[..] {
            // SAFETY: `all` owns the buffers and the report until the call has ended.
            [only] => unsafe { abi::call(&only.call, &mut only.report) },
            all => {
                abi::succeed("cinch_group_start", abi::group_start());
                // SAFETY: `all` owns the buffers and the reports until after the group.
                unsafe {
                    for prepared in &mut *all {
                        abi::call(&prepared.call, &mut prepared.report);
                    }
                    abi::group_end()
                }
            }
        };
        for prepared in &all {
            if let Some(op) = prepared.op {
                abi::succeed("cinch_op_destroy", comm.destroy_op(op));
            }
            if code == 0 {
                hash.bytes(&prepared.memory[prepared.output.clone()]);
                add_report(reports, &prepared.report);
            }
        }
        code
    }

    /// Runs the call through the C function of its collective. A send and its receive form a group.
    fn function(&mut self, comm: &Comm, call: &Call, hash: &mut Hash) -> Code {
        let all = self.prepare(comm, (self.rank.rank, self.rank.nranks), call);
        abi::succeed("cinch_group_start", abi::group_start());
        // SAFETY: `all` owns the buffers until after the group.
        let code = unsafe {
            for prepared in &all {
                abi::call_function(&prepared.call);
            }
            abi::group_end()
        };
        for prepared in all.iter().filter(|_| code == 0) {
            hash.bytes(&prepared.memory[prepared.output.clone()]);
        }
        code
    }

    /// Returns the call with its buffers. `SEND_RECV` becomes two calls: a send to the next rank and a
    /// receive from the previous rank.
    fn prepare(&mut self, comm: &Comm, ranks: (usize, usize), call: &Call) -> Vec<Prepared> {
        let (rank, nranks) = ranks;
        if call.collective != SEND_RECV {
            return vec![self.prepare_one(comm, ranks, call)];
        }
        [(8, (rank + 1) % nranks), (9, (rank + nranks - 1) % nranks)]
            .map(|(collective, peer)| {
                let mut prepared = self.prepare_one(
                    comm,
                    ranks,
                    &Call {
                        collective,
                        ..*call
                    },
                );
                prepared.call.peer = peer as i32;
                prepared
            })
            .into()
    }

    fn prepare_one(&mut self, comm: &Comm, ranks: (usize, usize), call: &Call) -> Prepared {
        let (rank, nranks) = ranks;
        let (size, count) = (call.dtype.size, call.count);
        let is_root = rank == call.root;
        let if_root = |blocks| if is_root { blocks } else { 0 };
        // Input and output hold these numbers of blocks of `count` elements. In place, the smaller buffer
        // begins at block `own` of the larger one.
        let (input, output, own) = match call.collective {
            ALL_REDUCE => (1, 1, Some(0)),
            1 => (1, nranks, Some(rank)),
            2 => (nranks, 1, Some(rank)),
            3 => (if_root(1), 1, Some(0)),
            4 => (1, if_root(1), Some(0)),
            5 => (1, if_root(nranks), Some(rank)),
            6 => (if_root(nranks), 1, Some(rank)),
            7 => (nranks, nranks, Some(0)),
            8 => (1, 0, None),
            _ => (0, 1, None),
        };
        let block = count * size;
        let values = self
            .inputs
            .take(call.dtype, call.pattern, call.salt, input * count)
            .to_vec();
        let in_place = self.rank.placement == Placement::InPlace && input > 0 && output > 0;
        let shift = usize::from(self.rank.placement == Placement::Unaligned);
        let mut prepared = Prepared {
            call: CCall::new(),
            memory: vec![0x5a; shift + input.max(output) * block],
            output: shift..shift + output * block,
            codec: call.codec.map(|codec| CString::new(codec).unwrap()),
            input: Vec::new(),
            report: Box::new(CReport::new()),
            op: None,
        };
        let mut at = shift;
        match own.filter(|_| in_place) {
            Some(own) => {
                let (from, to) = match input > output {
                    true => (0, own * block),
                    false => (own * block, 0),
                };
                prepared.memory[from..from + values.len()].copy_from_slice(&values);
                prepared.output = to..to + output * block;
                at = from;
            }
            None => {
                prepared.memory.truncate(shift + output * block);
                prepared.input = vec![0x5a; shift];
                prepared.input.extend(&values);
            }
        }
        let memory = prepared.memory.as_mut_ptr();
        let sendbuf = match prepared.input.is_empty() {
            true => memory.wrapping_add(at).cast_const(),
            false => prepared.input.as_ptr().wrapping_add(shift),
        };
        let op = match call.op {
            Op::BuiltIn(op) => op,
            Op::PreMulSum => {
                let (code, op) =
                    comm.create_premulsum(&factor(call.dtype, rank), call.dtype.number);
                abi::succeed("cinch_op_create_premulsum", code);
                prepared.op = Some(op);
                op
            }
        };
        prepared.call = CCall {
            comm: comm.handle(),
            sendbuf: sendbuf.cast(),
            recvbuf: memory.wrapping_add(prepared.output.start).cast(),
            count,
            collective: call.collective,
            dtype: call.dtype.number,
            op,
            root: call.root as i32,
            algorithm: call.algorithm,
            codec: abi::pointer(&prepared.codec),
            tensor: call.tensor,
            feedback: call.feedback,
            ..prepared.call
        };
        prepared
    }
}

/// Hashes a report without its transport, wire bytes and norm. Transports differ by design, and the
/// norm's last bits depend on the instruction set.
fn add_report(to: &mut Hash, report: &CReport) {
    for word in [
        report.valid.into(),
        report.algorithm.into(),
        report.saturated,
    ] {
        to.word(word);
    }
    for word in [report.non_finite, report.abs_max.to_bits(), report.fused] {
        to.word(word);
    }
    to.bytes(&report.codec.map(|byte| byte as u8));
}
