//! The offline model.

/// Placeholder.
pub struct OfflineModel;
