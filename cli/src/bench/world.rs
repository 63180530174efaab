//! The operations of a communicator that a benchmark uses, as a trait, so that tests need no
//! communicator.

use cinch::comm::{Call, Group};
use cinch::mem::{UserBuffers, bytes_of, bytes_of_mut};
use cinch::{Collective, Communicator, DType, Report, Result};

/// A rank of a communicator, real or simulated.
pub trait BenchRank {
    /// Returns this rank.
    fn rank(&self) -> usize;
    /// Returns the number of ranks.
    fn nranks(&self) -> usize;
    /// Returns host name and process id of each rank.
    fn places(&self) -> Vec<(String, u32)>;
    /// Runs one call on host memory.
    fn call(&self, call: &Call, buffers: UserBuffers<'_>) -> Result<Report>;
    /// Runs a send and a receive as one group. Returns the send's report.
    fn exchange(&self, send: (&Call, &[u8]), recv: (&Call, &mut [u8])) -> Result<Report>;
    /// Waits until every rank has called `barrier`.
    fn barrier(&self) -> Result<()>;
    /// Formats the candidates of a call and the winner.
    fn explain(&self, call: &Call) -> Result<String>;

    /// All-gathers words in rank order. All ranks must pass equally many words.
    fn gather_words(&self, words: &[u64]) -> Result<Vec<u64>> {
        let mut all = vec![0u64; words.len() * self.nranks()];
        let call = Call::new(Collective::AllGather, DType::U64, words.len());
        self.call(
            &call,
            UserBuffers::new(bytes_of(words), bytes_of_mut(&mut all)),
        )?;
        Ok(all)
    }
}

impl BenchRank for Communicator {
    fn rank(&self) -> usize {
        Communicator::rank(self)
    }

    fn nranks(&self) -> usize {
        Communicator::nranks(self)
    }

    fn places(&self) -> Vec<(String, u32)> {
        self.peers()
            .iter()
            .map(|peer| (peer.host.clone(), peer.pid))
            .collect()
    }

    fn call(&self, call: &Call, buffers: UserBuffers<'_>) -> Result<Report> {
        Communicator::call(self, call, buffers)
    }

    fn exchange(&self, send: (&Call, &[u8]), recv: (&Call, &mut [u8])) -> Result<Report> {
        let mut group = Group::new();
        group.add(self, send.0, UserBuffers::new(send.1, &mut []))?;
        group.add(self, recv.0, UserBuffers::new(&[], recv.1))?;
        let reports = group.run()?;
        reports
            .first()
            .copied()
            .ok_or_else(|| cinch::Error::internal("a group of two calls returned no report"))
    }

    fn barrier(&self) -> Result<()> {
        Communicator::barrier(self)
    }

    fn explain(&self, call: &Call) -> Result<String> {
        Communicator::explain(self, call)
    }
}

#[cfg(test)]
pub mod threads {
    //! Simulated ranks: threads that compute collectives with the reference implementation and can
    //! add flaws.

    use super::*;
    use cinch::testing::{Problem, set_value, unit_roundoff, value};
    use cinch::types::{Extent, TransportKind};
    use cinch::{Algorithm, CodecSetting, ReduceOp};
    use std::cell::Cell;
    use std::sync::{Arc, Barrier, Mutex};

    /// A flaw of a simulated rank, which the benchmark must detect.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum Flaw {
        None,
        /// Element 3 of rank 1's output is off by one unit or 10 %.
        WrongElement,
        /// Element 3 of rank 1's output is off by less than the tolerance.
        OneUlp,
        /// Every element gets noise with this relative magnitude.
        Noise(f64),
        /// Every element is zero.
        Zeros,
        /// Only the first call of a rank writes its output; later calls leave it as it was.
        OnlyOnce,
        /// Every call fails.
        Error,
    }

    pub struct ThreadRank {
        rank: usize,
        calls: Cell<usize>,
        shared: Arc<SharedState>,
    }

    struct SharedState {
        flaw: Flaw,
        inputs: Mutex<Vec<(Vec<u8>, ReduceOp)>>,
        barrier: Barrier,
    }

    /// Runs `body` on `nranks` threads and returns their results in rank order.
    pub fn run<T: Send>(
        nranks: usize,
        flaw: Flaw,
        body: impl Fn(&ThreadRank) -> T + Sync,
    ) -> Vec<T> {
        let shared = Arc::new(SharedState {
            flaw,
            inputs: Mutex::new(vec![(Vec::new(), ReduceOp::Sum); nranks]),
            barrier: Barrier::new(nranks),
        });
        let body = &body;
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..nranks)
                .map(|rank| {
                    let world = ThreadRank {
                        rank,
                        calls: Cell::new(0),
                        shared: shared.clone(),
                    };
                    scope.spawn(move || body(&world))
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    impl ThreadRank {
        /// Returns this rank's output, computed from all ranks' inputs.
        fn output(&self, call: &Call, inputs: &[(Vec<u8>, ReduceOp)]) -> Vec<u8> {
            let factor = |op| match op {
                ReduceOp::PreMulSum(factor) => Some(factor),
                _ => None,
            };
            let problem = Problem {
                op: call.op,
                factors: inputs.iter().filter_map(|input| factor(input.1)).collect(),
                root: call.root,
                peer: self.rank,
                ..Problem::new(call.collective, call.dtype, inputs.len(), call.count)
            };
            let inputs: Vec<Vec<u8>> = inputs.iter().map(|input| input.0.clone()).collect();
            problem.expected(&inputs, self.rank).unwrap().bytes
        }

        /// Returns whether this call must leave its output unwritten.
        fn skips(&self, call: &Call) -> bool {
            // Calls with type U64 have no flaw, because the benchmark gathers its own results with
            // them.
            let earlier = self.calls.replace(self.calls.get() + 1);
            self.shared.flaw == Flaw::OnlyOnce && earlier > 0 && call.dtype != DType::U64
        }

        fn spoil(&self, call: &Call, output: &mut [u8]) {
            let dtype = call.dtype;
            if dtype == DType::U64 {
                return; // the bench gathers its own results as U64
            }
            for (i, element) in output.chunks_exact_mut(dtype.size()).enumerate() {
                let here = self.rank == 1 && i == 3;
                match self.shared.flaw {
                    Flaw::WrongElement if here && dtype.is_float() => {
                        set_value(dtype, value(dtype, element) * 1.1 + 0.5, element);
                    }
                    Flaw::WrongElement if here => element[0] ^= 1,
                    Flaw::OneUlp if here => {
                        let factor = 1.0 + 2.0 * unit_roundoff(dtype);
                        set_value(dtype, value(dtype, element) * factor, element);
                    }
                    Flaw::Zeros => element.fill(0),
                    Flaw::Noise(size) => {
                        let sign = if i % 2 == 0 { 1.0 } else { -1.0 };
                        set_value(dtype, value(dtype, element) * (1.0 + sign * size), element);
                    }
                    _ => {}
                }
            }
        }
    }

    impl BenchRank for ThreadRank {
        fn rank(&self) -> usize {
            self.rank
        }

        fn nranks(&self) -> usize {
            self.shared.inputs.lock().unwrap().len()
        }

        fn places(&self) -> Vec<(String, u32)> {
            vec![("here".into(), 1); self.nranks()]
        }

        fn call(&self, call: &Call, mut buffers: UserBuffers<'_>) -> Result<Report> {
            if self.shared.flaw == Flaw::Error {
                return Err(cinch::Error::invalid_usage("flawed"));
            }
            let is_root = self.rank == call.root;
            let bytes = |extent: Extent| {
                extent.elements(call.count, self.nranks()).unwrap() * call.dtype.size()
            };
            let expected = bytes(call.collective.input_extent(is_root));
            assert_eq!(buffers.input_bytes(), expected, "input of {call:?}");
            let expected = bytes(call.collective.output_extent(is_root));
            assert_eq!(buffers.output_bytes(), expected, "output of {call:?}");
            let mut input = vec![0; buffers.input_bytes()];
            buffers.read_input(0, &mut input);
            let sent = input.len() as u64;
            self.shared.inputs.lock().unwrap()[self.rank] = (input, call.op);
            self.shared.barrier.wait();
            if buffers.output_bytes() > 0 && !self.skips(call) {
                let inputs = self.shared.inputs.lock().unwrap().clone();
                let mut output = self.output(call, &inputs);
                self.spoil(call, &mut output);
                buffers.write_output(0, &output);
            }
            self.shared.barrier.wait();
            Ok(report(call, sent))
        }

        fn exchange(&self, send: (&Call, &[u8]), recv: (&Call, &mut [u8])) -> Result<Report> {
            assert_eq!((send.0.root, recv.0.peer), (self.rank, self.rank));
            self.shared.inputs.lock().unwrap()[self.rank] = (send.1.to_vec(), ReduceOp::Sum);
            self.shared.barrier.wait();
            let inputs = self.shared.inputs.lock().unwrap().clone();
            if !self.skips(recv.0) {
                recv.1.copy_from_slice(&self.output(recv.0, &inputs));
                self.spoil(recv.0, recv.1);
            }
            self.shared.barrier.wait();
            Ok(report(send.0, send.1.len() as u64))
        }

        fn barrier(&self) -> Result<()> {
            self.shared.barrier.wait();
            Ok(())
        }

        fn explain(&self, call: &Call) -> Result<String> {
            Ok(format!("{} runs as threads", call.collective))
        }
    }

    fn report(call: &Call, wire_bytes: u64) -> Report {
        Report {
            codec: call.codec.unwrap_or(CodecSetting::RAW),
            algorithm: call.algorithm.unwrap_or(Algorithm::Direct),
            transport: Some(TransportKind::Loopback),
            channels: 1,
            wire_bytes,
            raw_bytes: wire_bytes,
            input: None,
            residual_norm: None,
            fused: 1,
        }
    }
}
