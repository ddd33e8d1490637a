"""What stops a build, in the words of the package's own errors: subject, value, rule, remedy."""

from __future__ import annotations


class BundleError(Exception):
    """A bundle that can't be built as the recipe says."""

    def __init__(self, subject: str, value: object, rule: str, remedy: str) -> None:
        super().__init__(f"{subject}: {value}: {rule}. {remedy}".rstrip())
        self.subject, self.value, self.rule, self.remedy = subject, value, rule, remedy
