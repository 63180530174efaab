//! Chooses and binds schedules.
