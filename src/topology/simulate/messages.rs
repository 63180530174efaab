//! Simulates the messages of a schedule, one by one.
//!
//! Each rank runs its steps in the order of [`walk`]. A step waits until the messages that it receives have
//! arrived, then gives its own messages to its connections. A connection moves one message at a time, has a fixed
//! number of slots, and a rank waits while all slots of a connection are full. All messages that move at one time
//! share links, pools and fans max-min fairly. A message arrives a fixed time after its last byte has moved.
//!
//! Encoding, decoding and sums take no time. Times are whole nanoseconds.

use super::cluster::Cluster;
use crate::error::{Error, ErrorKind, Result};
use crate::schedule::{Op, Schedule, SchedulePattern, Step, Visit, WalkCursor};
use crate::topology::graph::LinkId;
use crate::topology::limits::FanFlows;
use crate::topology::rates::SharedLimits;
use std::collections::{HashMap, VecDeque};

/// Settings of a simulation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageSettings {
    /// Number of passes into which the schedule divides the message; at least 1.
    pub passes: usize,
    /// Nanoseconds from the last byte of a message to its use by the receiver.
    pub hop_ns: u64,
    /// GPU of each rank of a host, by index in [`crate::topology::MachineGraph::gpus`]; empty for the order of ranks.
    pub placement: Vec<usize>,
}

impl Default for MessageSettings {
    /// 16 passes and 3 microseconds a message, with ranks in order.
    fn default() -> MessageSettings {
        MessageSettings {
            passes: 16,
            hop_ns: 3_000,
            placement: Vec::new(),
        }
    }
}

/// Largest number of ranks.
const MAX_RANKS: usize = 1_024;

/// Number of parts into which each byte of a message is divided, so that bytes per second times nanoseconds
/// is a whole number of parts.
const PARTS_OF_A_BYTE: u64 = 1_000_000_000;

/// Largest number of bytes of a collective. A single message may have all of these bytes, and its parts must
/// fit 64 bits.
const MAX_BYTES: u64 = u64::MAX / PARTS_OF_A_BYTE;

/// Returns the nanoseconds that `pattern` takes for a message of `bytes` bytes. If the collective has a block
/// for each rank, `bytes` is the size of one block.
///
/// # Errors
/// Unsupported for a pattern that has no schedule, for more than 1,024 ranks or 18 GB. Invalid argument if the cluster
/// has another number of ranks, or if `settings` name no pass or a placement that is no permutation of a host's GPUs.
/// Internal if the schedule does not end.
pub fn simulate_messages(
    cluster: &Cluster,
    pattern: &SchedulePattern,
    bytes: u64,
    settings: &MessageSettings,
) -> Result<u64> {
    check(cluster, pattern, bytes, settings)?;
    let mut simulation = Simulation::new(cluster, pattern, bytes, settings)?;
    simulation.run()
}

fn check(
    cluster: &Cluster,
    pattern: &SchedulePattern,
    bytes: u64,
    settings: &MessageSettings,
) -> Result<()> {
    let gpus = cluster.graph.gpus.len();
    let mut sorted = settings.placement.clone();
    sorted.sort_unstable();
    if !sorted.is_empty() && !sorted.iter().copied().eq(0..gpus) {
        return Err(Error::invalid_argument(format!(
            "a placement names each of the {gpus} GPUs of a host once, not {:?}",
            settings.placement
        )));
    }
    if settings.passes == 0 {
        return Err(Error::invalid_argument("a simulation has at least 1 pass"));
    }
    if pattern.nranks != cluster.ranks() {
        return Err(Error::invalid_argument(format!(
            "a schedule of {} ranks for a cluster of {}",
            pattern.nranks,
            cluster.ranks()
        )));
    }
    if pattern.nranks > MAX_RANKS || bytes > MAX_BYTES {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "messages are simulated for up to {MAX_RANKS} ranks and {MAX_BYTES} bytes, not {} and {bytes}; \
                 use the flows",
                pattern.nranks
            ),
        ));
    }
    Ok(())
}

/// A rank with its position in its schedule.
struct SimulatedRank {
    schedule: Schedule,
    cursor: WalkCursor,
    visit: Option<Visit>,
    /// Whether the current step has received its messages. `sent` is the number of messages that the step has
    /// sent.
    has_received: bool,
    sent: usize,
    is_finished: bool,
}

/// A connection from a rank to another.
struct SimulatedConnection {
    from: u32,
    to: u32,
    /// Messages that wait to move, in bytes.
    waiting: VecDeque<u64>,
    is_moving: bool,
    /// Number of messages that have arrived and that no step has received yet.
    arrived: usize,
    /// Number of slots in use.
    slots: usize,
}

/// A message that is crossing links.
struct MovingMessage {
    connection: usize,
    /// Parts of a byte that have not moved yet.
    left: u64,
}

struct Simulation<'a> {
    cluster: &'a Cluster,
    pattern: &'a SchedulePattern,
    bytes: u64,
    settings: &'a MessageSettings,
    /// Number of slots that each connection has.
    slots: usize,
    /// GPU of each rank of a host.
    placement: Vec<usize>,
    now: u64,
    ranks: Vec<SimulatedRank>,
    connections: Vec<SimulatedConnection>,
    /// Limits that the messages of each connection share.
    routes: Vec<Vec<u32>>,
    by_ranks: HashMap<(u32, u32), usize>,
    moving: Vec<MovingMessage>,
    /// Times at which messages arrive, in order, with their connections.
    arriving: VecDeque<(u64, usize)>,
    /// Ranks that may be able to run their next step.
    ready: VecDeque<usize>,
    limits: SharedLimits,
    /// For each host, the moving messages that cross its fans.
    fans: Vec<FanFlows>,
    rates: Vec<u64>,
    flows: Vec<usize>,
    are_rates_stale: bool,
}

impl<'a> Simulation<'a> {
    fn new(
        cluster: &'a Cluster,
        pattern: &'a SchedulePattern,
        bytes: u64,
        settings: &'a MessageSettings,
    ) -> Result<Simulation<'a>> {
        let ranks = (0..pattern.nranks).map(|rank| {
            let schedule = pattern.schedule(rank)?;
            Ok(SimulatedRank {
                cursor: WalkCursor::new(&schedule, settings.passes),
                schedule,
                visit: None,
                has_received: false,
                sent: 0,
                is_finished: false,
            })
        });
        let placement = match settings.placement.is_empty() {
            true => cluster.graph.by_rank(),
            false => settings.placement.clone(),
        };
        let mut simulation = Simulation {
            cluster,
            pattern,
            bytes,
            settings,
            slots: pattern.slots(),
            placement,
            now: 0,
            ranks: ranks.collect::<Result<_>>()?,
            connections: Vec::new(),
            routes: Vec::new(),
            by_ranks: HashMap::new(),
            moving: Vec::new(),
            arriving: VecDeque::new(),
            ready: (0..pattern.nranks).collect(),
            limits: SharedLimits::new(&cluster.graph, cluster.hosts),
            fans: vec![FanFlows::new(&cluster.graph.fans); cluster.hosts],
            rates: Vec::new(),
            flows: Vec::new(),
            are_rates_stale: false,
        };
        simulation.connect();
        Ok(simulation)
    }

    /// Creates the connections that the schedules use.
    fn connect(&mut self) {
        for from in 0..self.ranks.len() {
            for step in &self.ranks[from].schedule.steps {
                for &to in step.send_to.iter() {
                    let key = (from as u32, to);
                    if self.by_ranks.contains_key(&key) {
                        continue;
                    }
                    self.by_ranks.insert(key, self.connections.len());
                    self.connections.push(SimulatedConnection {
                        from: key.0,
                        to,
                        waiting: VecDeque::new(),
                        is_moving: false,
                        arrived: 0,
                        slots: 0,
                    });
                }
            }
        }
        let routes = self.connections.iter().map(|c| self.route(c.from, c.to));
        self.routes = routes.collect();
    }

    /// Returns the host of a rank, and its GPU.
    fn place(&self, rank: u32) -> (usize, usize) {
        let gpus = self.placement.len();
        (rank as usize / gpus, self.placement[rank as usize % gpus])
    }

    fn route(&self, from: u32, to: u32) -> Vec<u32> {
        let ((host, gpu), (to_host, to_gpu)) = (self.place(from), self.place(to));
        if host == to_host {
            let links: &[LinkId] = &self.cluster.paths.get(gpu, to_gpu).links;
            return self.limits.route(host, links);
        }
        let mut route = self.limits.route(host, self.cluster.out(gpu));
        route.extend(self.limits.route(to_host, &self.cluster.back(to_gpu)));
        route
    }

    fn run(&mut self) -> Result<u64> {
        loop {
            while let Some(rank) = self.ready.pop_front() {
                self.advance(rank);
            }
            if self.are_rates_stale {
                self.update_rates();
            }
            let until_moved = self.moving.iter().zip(&self.rates);
            let until_moved = until_moved.map(|(m, rate)| m.left.div_ceil(*rate)).min();
            let until_arrived = self.arriving.front().map(|(time, _)| time - self.now);
            let Some(wait) = until_moved.into_iter().chain(until_arrived).min() else {
                break;
            };
            self.now = self.now.saturating_add(wait);
            self.move_messages(wait);
            while let Some(&(time, connection)) = self.arriving.front()
                && time <= self.now
            {
                self.arriving.pop_front();
                self.connections[connection].arrived += 1;
                self.ready
                    .push_back(self.connections[connection].to as usize);
            }
        }
        match self.ranks.iter().position(|rank| !rank.is_finished) {
            None => Ok(self.now),
            Some(rank) => Err(Error::internal(format!(
                "rank {rank} of the simulated schedule waits for ever at {:?}",
                self.ranks[rank].visit
            ))),
        }
    }

    /// Runs steps of a rank until one has to wait.
    fn advance(&mut self, rank: usize) {
        loop {
            let SimulatedRank {
                schedule,
                cursor,
                visit,
                has_received,
                sent,
                is_finished,
            } = &mut self.ranks[rank];
            if visit.is_none() {
                *visit = cursor.next(schedule);
                (*has_received, *sent) = (false, 0);
            }
            let Some(Visit { pass, step }) = *visit else {
                *is_finished = true;
                return;
            };
            let step = schedule.steps[step];
            if !self.receive(rank, &step) || !self.send(rank, &step, pass) {
                return;
            }
            self.ranks[rank].visit = None;
        }
    }

    /// Receives the messages of a step, if it has not; returns whether it has.
    fn receive(&mut self, rank: usize, step: &Step) -> bool {
        if self.ranks[rank].has_received || !step.op.receives() {
            return true;
        }
        let connection = |from: &u32| self.by_ranks.get(&(*from, rank as u32)).copied();
        let from: Vec<usize> = step.recv_from.iter().filter_map(connection).collect();
        let has_all = from.iter().all(|&at| self.connections[at].arrived > 0);
        if !has_all || from.len() < step.recv_from.len() {
            return false;
        }
        // All steps of a forwarding chain read one message, and the last of these steps frees its slot.
        let forwards = matches!(step.op, Op::Recv | Op::RecvCopySend);
        if !(forwards && step.more) {
            for at in from {
                let connection = &mut self.connections[at];
                connection.arrived -= 1;
                connection.slots -= 1;
                self.ready.push_back(connection.from as usize);
            }
        }
        self.ranks[rank].has_received = true;
        true
    }

    /// Sends the messages of a step until one finds no slot; returns whether all are sent.
    fn send(&mut self, rank: usize, step: &Step, pass: usize) -> bool {
        let bytes = self.chunk_bytes(step.chunk as usize, pass);
        for &to in &step.send_to[self.ranks[rank].sent..] {
            let Some(&at) = self.by_ranks.get(&(rank as u32, to)) else {
                return false;
            };
            let connection = &mut self.connections[at];
            if connection.slots == self.slots {
                return false;
            }
            connection.slots += 1;
            connection.waiting.push_back(bytes);
            self.ranks[rank].sent += 1;
            self.begin(at);
        }
        true
    }

    /// Returns the bytes of a chunk in a pass. Remainders go to the first passes and chunks.
    fn chunk_bytes(&self, chunk: usize, pass: usize) -> u64 {
        let share = |bytes: u64, parts: usize, at: usize| {
            bytes / parts as u64 + u64::from((at as u64) < bytes % parts as u64)
        };
        let bytes = share(self.bytes, self.settings.passes, pass);
        share(bytes, self.pattern.parts(), self.pattern.part(chunk))
    }

    /// Begins to move the next message of a connection, if none moves.
    fn begin(&mut self, at: usize) {
        let connection = &mut self.connections[at];
        if connection.is_moving {
            return;
        }
        let Some(bytes) = connection.waiting.pop_front() else {
            return;
        };
        connection.is_moving = true;
        self.moving.push(MovingMessage {
            connection: at,
            left: bytes * PARTS_OF_A_BYTE,
        });
        self.count_in_fans(at, true);
        self.are_rates_stale = true;
    }

    /// Adds the current message of a connection to the fans of its host, or removes it.
    fn count_in_fans(&mut self, at: usize, add: bool) {
        let SimulatedConnection { from, to, .. } = self.connections[at];
        let ((host, gpu), (to_host, to_gpu)) = (self.place(from), self.place(to));
        if host == to_host && !self.fans[host].is_empty() {
            let path = self.cluster.paths.get(gpu, to_gpu);
            self.fans[host].count(gpu, &path.links, path.root_port, add);
        }
    }

    fn update_rates(&mut self) {
        for (host, fans) in self.fans.iter().enumerate() {
            self.limits.hold(&self.cluster.graph, host, fans);
        }
        self.flows.clear();
        self.flows.extend(self.moving.iter().map(|m| m.connection));
        self.limits
            .share(&self.flows, &self.routes, &mut self.rates);
        self.are_rates_stale = false;
    }

    /// Moves all messages for `wait` nanoseconds. Where a message is through, begins to move the next message
    /// of the connection.
    fn move_messages(&mut self, wait: u64) {
        let mut through = Vec::new();
        for (message, rate) in self.moving.iter_mut().zip(&self.rates) {
            message.left = message.left.saturating_sub(rate.saturating_mul(wait));
            if message.left == 0 {
                through.push(message.connection);
            }
        }
        if through.is_empty() {
            return;
        }
        self.moving.retain(|message| message.left > 0);
        self.are_rates_stale = true;
        for at in through {
            self.connections[at].is_moving = false;
            self.count_in_fans(at, false);
            let arrives = self.now.saturating_add(self.settings.hop_ns);
            self.arriving.push_back((arrives, at));
            self.begin(at);
        }
    }
}
