//! Rank processes, as their parent process controls them.

use crate::harness::{MARK, Stop};
use crate::options::Options;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Rank processes. They end when this value is dropped or when the parent process ends.
pub struct Ranks {
    pub children: Vec<Child>,
    said: Receiver<(usize, String)>,
    /// Received lines for which no `wait_for` has waited yet; ranks send lines at their own pace.
    backlog: Vec<(usize, String)>,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Ranks {
    /// Starts a rank process for each task.
    pub fn start(options: &Options, tasks: impl Iterator<Item = String>) -> Result<Ranks, Stop> {
        let (sender, said) = channel();
        let mut ranks = Ranks {
            children: Vec::new(),
            said,
            backlog: Vec::new(),
        };
        for (rank, task) in tasks.enumerate() {
            let mut child = Command::new(std::env::current_exe()?)
                .args(options.words())
                .arg(format!("--rank={task}"))
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()?;
            let output = child.stdout.take();
            ranks.children.push(child);
            let sender: Sender<_> = sender.clone();
            // The thread ends when its child closes stdout.
            std::thread::spawn(move || {
                let lines = output
                    .map(BufReader::new)
                    .into_iter()
                    .flat_map(BufRead::lines);
                for line in lines.map_while(Result::ok) {
                    if let Some(said) = line.strip_prefix(MARK) {
                        let _ = sender.send((rank, said.to_string()));
                    }
                }
                let _ = sender.send((rank, "ended ".into()));
            });
        }
        Ok(ranks)
    }

    /// Waits until each of `ranks` has sent a line that starts with `word`. Returns the rest of
    /// each line, in the order of `ranks`.
    pub fn wait_for(
        &mut self,
        word: &str,
        ranks: &[usize],
        patience: Duration,
    ) -> Result<Vec<String>, Stop> {
        let mut found = vec![None; self.children.len()];
        let deadline = Instant::now() + patience;
        let mut lines = std::mem::take(&mut self.backlog);
        loop {
            for (rank, line) in lines.drain(..) {
                match line.split_once(' ') {
                    Some((first, rest)) if first == word => found[rank] = Some(rest.to_string()),
                    Some(("failed", why)) => return Stop::wrong(format!("rank {rank}: {why}")),
                    Some(("ended", _)) if ranks.contains(&rank) && found[rank].is_none() => {
                        return Stop::wrong(format!("rank {rank} ended before it said {word:?}"));
                    }
                    _ => self.backlog.push((rank, line)),
                }
            }
            if ranks.iter().all(|&rank| found[rank].is_some()) {
                let texts = ranks
                    .iter()
                    .map(|&rank| found[rank].take().unwrap_or_default());
                return Ok(texts.collect());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            match self.said.recv_timeout(left) {
                Ok(line) => lines.push(line),
                Err(_) => {
                    return Stop::wrong(format!(
                        "no {word:?} of {ranks:?} within {patience:?}: got {found:?} and {:?}",
                        self.backlog
                    ));
                }
            }
        }
    }
}
