//! The CUDA sources of the project, compiled for the host and compared with the scalar specification.
#![allow(unsafe_code)] // functions of C++

mod codecs;
mod elements;
mod fused;
mod fused_coded;
mod fused_kernels;
mod fused_work;
mod host;
mod interpreter;
mod interpreter_cases;
mod interpreter_work;
mod kernels;
mod library;
mod statistics;
mod steps;
