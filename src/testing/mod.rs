//! Many ranks in one process, reference results, error bounds.
