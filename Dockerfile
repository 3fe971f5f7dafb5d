# One image a program: docker build --target rollout -t moerl/rollout .
# The build steps are the repository's own scripts. Targets: rollout, trainer, weight-sync, environment, tools.
FROM debian:12 AS build
WORKDIR /src
COPY scripts/install-deps scripts/install-deps
RUN scripts/install-deps
COPY . .
RUN cmake --preset release -DMOERL_BUILD_TESTS=OFF -DMOERL_FAILPOINTS=OFF \
    && cmake --build build/release -j "$(nproc)" \
    && cmake --install build/release --prefix /opt/moerl --strip

FROM debian:12-slim AS runtime
COPY scripts/install-deps scripts/install-deps
RUN scripts/install-deps --runtime && rm -r scripts \
    && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin moerl
USER 10001:10001

FROM runtime AS rollout
COPY --from=build /opt/moerl/bin/moerl-rollout /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/moerl-rollout"]

FROM runtime AS trainer
COPY --from=build /opt/moerl/bin/moerl-trainer /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/moerl-trainer"]

FROM runtime AS weight-sync
COPY --from=build /opt/moerl/bin/moerl-weight-sync /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/moerl-weight-sync"]

FROM runtime AS environment
COPY --from=build /opt/moerl/bin/moerl-environment /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/moerl-environment"]

FROM runtime AS tools
COPY --from=build /opt/moerl/bin/moerl /usr/local/bin/
ENTRYPOINT ["/usr/local/bin/moerl"]
