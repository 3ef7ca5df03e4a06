export { Gateway, GatewayError } from "./gateway.js";
export { load, results, submit, wait } from "./loader.js";
export { work } from "./worker.js";
