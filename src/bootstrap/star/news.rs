//! That the communicator has failed: who raises it here, and who is told.

use super::monitor::*;
use super::*;
use crate::bootstrap::channel::Frame;
use crate::bootstrap::wire::read_error;

/// Why the communicator has failed.
pub(super) struct Failure {
    /// As ranks are told.
    pub(super) body: Arc<Body>,
    /// A hub knows it, and tells all.
    known: bool,
}

impl Monitor {
    /// The communicator has failed: here, and everywhere.
    pub(super) fn fail(&mut self, error: Error) {
        let body = Body::new(write_error(&error));
        self.raise(error, &body, false);
        self.tell_all_but(None, ANNOUNCE, &body);
    }

    /// After a rank's own goodbye its fault stays as it is: communicators split from this one
    /// watch it too. `body` is what the others are told, `known` whether the hub tells them.
    fn raise(&mut self, error: Error, body: &Arc<Body>, known: bool) {
        self.note_failure(body, known);
        if self.leaving.is_none() {
            pass_on(&self.shared.fault, error, self.shared.beat);
        }
        self.shared.changed.notify_all();
    }

    /// Tells the others of a fault that came from elsewhere, from the communicator that this one was
    /// split from for instance: nobody else here may look at it for a long time.
    pub(super) fn report_own(&mut self) {
        if self.failure.is_some() || self.leaving.is_some() {
            return;
        }
        if let Err(reason) = self.shared.fault.check() {
            self.announce(&self.shared.report(&reason));
        }
    }

    pub(super) fn announce(&mut self, told: &Error) {
        let body = Body::new(write_error(told));
        self.note_failure(&body, false);
        self.tell_all_but(None, ANNOUNCE, &body);
    }

    fn note_failure(&mut self, body: &Arc<Body>, known: bool) {
        let failure = self.failure.get_or_insert_with(|| Failure {
            body: body.clone(),
            known,
        });
        failure.known |= known;
    }

    /// Whether there is a failure that not every rank hears of if this one goes now.
    pub(super) fn has_more_to_tell(&self) -> bool {
        let news = self.failure.as_ref().is_some_and(|failure| !failure.known);
        let to_whom = match self.is_hub() {
            true => self.absent().next().is_some(),
            false => {
                let mut links = self.links.iter();
                self.succession.is_seeking() || links.any(|link| link.channel.is_some())
            }
        };
        news && to_whom
    }

    /// Another rank says that the communicator has failed.
    pub(super) fn hear_announcement(&mut self, at: usize, frame: Frame) -> Result<()> {
        let error = read_error(&frame.body)?;
        let body = Body::new(frame.body);
        if !self.is_hub() {
            self.raise(error, &body, true);
        } else if self.failure.is_some() {
            // Whoever tells waits for the word that it is known.
            self.links[at].send(ANNOUNCE, &body);
        } else {
            self.raise(error, &body, false);
            self.tell_all_but(None, ANNOUNCE, &body);
        }
        Ok(())
    }
}
