//! The integration tests: one binary, one module a feature.

mod routes;
