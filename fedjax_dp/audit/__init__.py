"""Audits: lower bounds on ε from attacks on the engine's rounds, compared with the claimed ε."""

from fedjax_dp.audit import conformance
from fedjax_dp.audit.canaries import plant_clients, plant_records
from fedjax_dp.audit.canary_records import plant_losses, plant_votes
from fedjax_dp.audit.collusion import (
    CollusionResult,
    OmissionResult,
    collude,
    collusion,
    expected_r2,
    expected_residual,
    omit_noise,
    snoop,
)
from fedjax_dp.audit.membership import MembershipResult, attack_model, membership_attack
from fedjax_dp.audit.noise import StepCheck
from fedjax_dp.audit.runs import AuditResult, AuditRuns, audit, run_audit
from fedjax_dp.audit.steps import check_choice, check_client, check_cohort, check_gradient_rule

__all__ = [
    "AuditResult",
    "AuditRuns",
    "CollusionResult",
    "MembershipResult",
    "OmissionResult",
    "StepCheck",
    "attack_model",
    "audit",
    "check_choice",
    "check_client",
    "check_cohort",
    "check_gradient_rule",
    "collude",
    "collusion",
    "conformance",
    "expected_r2",
    "expected_residual",
    "membership_attack",
    "omit_noise",
    "plant_clients",
    "plant_losses",
    "plant_records",
    "plant_votes",
    "run_audit",
    "snoop",
]
