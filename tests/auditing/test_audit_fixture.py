"""The fixture `isobit_audit` in a user's tests."""

pytest_plugins = ("pytester",)


def test_the_fixture_fails_with_the_guilty_operators(pytester):
    pytester.makepyfile(
        """
        import torch, isobit
        def test_kept(isobit_audit):
            report = isobit_audit(isobit.nn.Linear(8, 4), torch.randn(3, 8), vary=("batch",))
            assert report.axes[0].judged == 1
        def test_broken(isobit_audit):
            isobit_audit(torch.nn.BatchNorm1d(8), torch.randn(3, 8, 2), vary=("batch",))
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*native_batch_norm*"])
